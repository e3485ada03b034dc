// Conversations as a file, and back. A file is not trusted: each field is checked, and no other field is taken over.

import {ENDS, LIMITS, newId, ROLES, sizeOf} from "./conversation.js";
import {isImageUrl} from "./images.js";

const FORMAT = "llmcl-conversations", VERSION = 1;

export function exportText(conversations) {
  const kept = conversations.map(({title, created, changed, system, first, messages}) =>
    ({title, created, changed, system, first, messages}));
  return JSON.stringify({format: FORMAT, version: VERSION, conversations: kept}, null, 1);
}

// Returns the conversations in a file, with new ids. Throws an Error that names the wrong place.
export function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error("the file is not JSON: " + error.message);
  }
  if (!isObject(file) || file.format !== FORMAT) throw new Error(`the file has no "format": "${FORMAT}"`);
  if (file.version !== VERSION) throw new Error(`version: expected ${VERSION}, found ${shown(file.version)}`);
  return items(file.conversations, "conversations", LIMITS.conversations).map(readConversation);
}

function readConversation(conversation, n) {
  const place = `conversations[${n}]`;
  check(isObject(conversation), place, conversation, "an object");
  const read = {
    id: newId(), version: 0,
    title: string(conversation.title, place + ".title").slice(0, LIMITS.title),
    created: time(conversation.created, place + ".created"),
    changed: time(conversation.changed, place + ".changed"),
    system: string(conversation.system, place + ".system"),
    first: conversation.first,
    messages: items(conversation.messages, place + ".messages", LIMITS.messages)
      .map((message, i) => readMessage(message, i, `${place}.messages[${i}]`)),
  };
  checkChosen(read, read.first, -1, place + ".first");
  read.messages.forEach((message, i) => checkChosen(read, message.child, i, `${place}.messages[${i}].child`));
  if (sizeOf(read) > LIMITS.size) throw new Error(`${place}: larger than ${LIMITS.size} characters`);
  return read;
}

// A message comes after its parent, so the tree has no circle.
function readMessage(message, index, place) {
  check(isObject(message), place, message, "an object");
  const {role, parent, end, used} = message;
  check(ROLES.includes(role), place + ".role", role, "one of " + ROLES.join(", "));
  check(Number.isInteger(parent) && parent >= -1 && parent < index, place + ".parent", parent, `-1 to ${index - 1}`);
  check(ENDS.includes(end), place + ".end", end, "one of " + ENDS.join(", "));
  check(Number.isSafeInteger(used) && used >= 0, place + ".used", used, "a number of tokens");
  const files = items(message.files, place + ".files", LIMITS.files).map((file, i) => {
    const where = `${place}.files[${i}]`;
    check(isObject(file), where, file, "an object");
    const name = string(file.name, where + ".name");
    if (file.image === undefined) return {name, text: string(file.text, where + ".text")};
    check(isImageUrl(file.image), where + ".image", file.image, "a PNG, JPEG or WebP image as a data URL");
    return {name, image: file.image};
  });
  const text = string(message.text, place + ".text"), thoughts = string(message.thoughts, place + ".thoughts");
  return {role, parent, child: message.child, text, files, thoughts, end, used};
}

function checkChosen({messages}, child, parent, place) {
  const isThere = Number.isInteger(child) && (child === -1 || messages[child]?.parent === parent);
  check(isThere, place, child, `-1, or a message whose parent is ${parent}`);
}

function items(value, place, most) {
  check(Array.isArray(value), place, value, "a list");
  if (value.length > most) throw new Error(`${place}: ${value.length} entries, at most ${most} are taken`);
  return value;
}

function string(value, place) {
  check(typeof value === "string", place, value, "a text");
  return value;
}

function time(value, place) {
  check(Number.isSafeInteger(value) && Math.abs(value) <= 8.64e15, place, value, "milliseconds since 1970");
  return value;
}

function check(holds, place, value, expected) {
  if (!holds) throw new Error(`${place}: expected ${expected}, found ${shown(value)}`);
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function shown(value) {
  return String(JSON.stringify(value)).slice(0, 60);
}
