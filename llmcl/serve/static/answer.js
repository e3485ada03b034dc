// Writes one answer into a conversation, from the request to the last token.

import {toRequest} from "./conversation.js";
import {clearFigures, hideProgress, showProgress, showTimes} from "./figures.js";
import {streamChat} from "./server.js";
import {apiKey, requestFields} from "./settings.js";

const DRAW_MS = 50;

// Writes the answer `index`; one that already has text goes on. draw: called when there is more to show.
// Throws what the server says is wrong. The message's `end` then tells "failed".
export async function writeAnswer(conversation, index, signal, draw) {
  const message = conversation.messages[index], begin = performance.now(), times = [];
  const body = {
    messages: toRequest(conversation, index), stream: true, return_progress: true,
    stream_options: {include_usage: true}, ...requestFields(), ...(message.text ? {continue_final_message: true} : {}),
  };
  let last = 0, ttft = 0, timer = 0;
  const show = () => {
    timer = 0;
    hideProgress();
    draw();
    showTimes(ttft, times);
  };
  message.end = "stopped"; // holds until the server says how it ended, also if the page is closed before
  clearFigures();
  try {
    for await (const chunk of streamChat(body, apiKey(), signal)) {
      if (chunk.prompt_progress) showProgress(chunk.prompt_progress);
      if (chunk.usage) message.used = chunk.usage.total_tokens;
      const {delta = {}, finish_reason: reason} = chunk.choices[0] ?? {};
      if (reason) message.end = reason === "length" ? "length" : "stop";
      if (!delta.content && !delta.reasoning_content) continue;
      const now = performance.now();
      if (last) times.push(now - last); else ttft = now - begin;
      last = now;
      message.text += delta.content || "";
      message.thoughts += delta.reasoning_content || "";
      timer ||= setTimeout(show, DRAW_MS);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      message.end = "failed";
      throw error;
    }
  } finally {
    clearTimeout(timer);
    hideProgress();
    showTimes(ttft, times);
  }
}
