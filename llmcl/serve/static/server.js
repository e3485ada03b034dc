// Requests to the server that this page comes from.

// Takes text as it comes and returns the data of each event that is complete.
export function eventReader() {
  let rest = "";
  return chunk => {
    rest += chunk;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    return blocks.flatMap(block => block.split("\n")).filter(line => line.startsWith("data: ")).map(line => line.slice(6));
  };
}

function headers(key) {
  return {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {})};
}

async function read(path, key) {
  const answer = await fetch(path, {headers: headers(key)});
  const body = await answer.json();
  if (answer.ok) return body;
  throw Object.assign(new Error(body.error.message), {isLoading: answer.status === 503});
}

// Returns the model's name, the context in tokens (0: unknown), whether it takes images (null: unknown), and the names of
// all models if there are several.
// chosen: the model's name. The error of a server that still loads has isLoading.
export async function modelFacts(key, chosen) {
  let props = await read("props", key), names = [];
  if (props.role === "router") {
    const models = (await read("v1/models", key)).data, model = models.find(({id}) => id === chosen) ?? models[0];
    names = models.map(({id}) => id);
    if (model.status.value !== "loaded") return {name: model.id, context: 0, images: null, names};
    props = await read("props?model=" + encodeURIComponent(model.id), key);
  }
  const {model: name, default_generation_settings: {n_ctx: context}, modalities} = props;
  return {name, context, images: modalities?.vision ?? null, names};
}

// Yields the chunks of a streamed answer.
export async function* streamChat(body, key, signal) {
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader(), events = eventReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    for (const data of events(part.value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
  throw new Error("the connection ended before the answer did");
}
