// A conversation is a tree of messages. Editing and retrying add a message beside the old one, so nothing is lost.
//
// messages: in the order in which they were written. A message has
//   role      "user" or "assistant"
//   parent    the index of the message before it, -1 at the beginning
//   child     the index of the message chosen after it, -1 at the end
//   text
//   files     a user's files: {name, text}, or {name, image} with a data URL
//   thoughts  an answer's thoughts
//   end       how an answer ended: "stop", "length", "stopped" or "failed"
//   used      tokens of the context that were full after an answer, 0: unknown
// first: the index of the message chosen at the beginning, -1 without messages.
// version: counts the times that the conversation was stored; the store changes it.

// What is stored and imported at most. Sizes are in characters.
export const LIMITS = {
  conversations: 500, size: 16_000_000, totalSize: 100_000_000, messages: 10_000, title: 200,
  files: 20, fileSize: 1 << 20,
};
export const ROLES = ["user", "assistant"];
export const ENDS = ["stop", "length", "stopped", "failed"];

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // crypto.randomUUID needs https
  return Array.from(bytes, byte => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(system = "") {
  const now = Date.now();
  return {id: newId(), title: "", created: now, changed: now, version: 0, system, first: -1, messages: []};
}

// Adds a message after the message `parent` and chooses it. Returns its index.
export function append(conversation, parent, role, text, files = []) {
  const index = conversation.messages.length;
  conversation.messages.push({role, parent, child: -1, text, files, thoughts: "", end: "stop", used: 0});
  choose(conversation, index);
  return index;
}

export function choose(conversation, index) {
  const {parent} = conversation.messages[index];
  if (parent < 0) conversation.first = index; else conversation.messages[parent].child = index;
}

// Returns the indices of the chosen messages, from the beginning.
export function chosenPath(conversation) {
  const path = [];
  for (let i = conversation.first; i >= 0; i = conversation.messages[i].child) path.push(i);
  return path;
}

// Returns the indices of a message and its other versions.
export function versions(conversation, index) {
  const {parent} = conversation.messages[index];
  return conversation.messages.flatMap((message, i) => message.parent === parent ? [i] : []);
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find(message => message.text.trim() || message.files.length);
  if (!first) return "New conversation";
  return (first.text.trim().split("\n")[0] || first.files[0].name).slice(0, 80);
}

export function sizeOf(conversation) {
  const sizes = conversation.messages.map(({text, thoughts, files}) =>
    text.length + thoughts.length + files.reduce((sum, file) => sum + file.name.length + (file.image || file.text).length, 0));
  return sizes.reduce((sum, size) => sum + size + 100, conversation.system.length + conversation.title.length);
}

// A file as part of a message. The fence is longer than any in the file.
function fenced({name, text}) {
  const longest = (text.match(/`{3,}/g) || []).reduce((most, ticks) => Math.max(most, ticks.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${name}\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
}

// Returns a message for the server: a text, or a list of parts if it has images.
function contentOf({text, files}) {
  const images = files.filter(file => file.image).map(({image}) => ({type: "image_url", image_url: {url: image}}));
  const said = files.filter(file => !file.image).map(fenced).join("") + text;
  return images.length ? [...images, ...asParts(said)] : said;
}

function asParts(content) {
  if (typeof content !== "string") return content;
  return content ? [{type: "text", text: content}] : [];
}

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return first + "\n\n" + second;
  return [...asParts(first), {type: "text", text: ""}, ...asParts(second)]; // the server puts line breaks between texts
}

// Returns the chosen messages up to `last` for the server. Templates insist on turns, so user messages whose answer was
// stopped before its first word become one.
export function toRequest(conversation, last) {
  const turns = conversation.system ? [{role: "system", content: conversation.system}] : [];
  for (const index of chosenPath(conversation)) {
    const {role} = conversation.messages[index], content = contentOf(conversation.messages[index]);
    const before = turns[turns.length - 1];
    if (role === "assistant" && !content) {
      // nothing was said
    } else if (before && before.role === role) {
      before.content = joined(before.content, content);
    } else {
      turns.push({role, content});
    }
    if (index === last) break;
  }
  return turns;
}
