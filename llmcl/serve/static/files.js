// Text files of the message that is being written: chosen, dropped or pasted.

import {LIMITS} from "./conversation.js";
import {button, byId, make, notify} from "./elements.js";

let chosen = [];

export function takeFiles() {
  const files = chosen;
  setFiles([]);
  return files;
}

export function setFiles(files) {
  chosen = files;
  byId("files").replaceChildren(...files.map((file, i) => {
    const remove = button("\u00d7", `Remove ${file.name}`, () => {
      setFiles(chosen.filter((_, n) => n !== i));
      byId("input").focus();
    });
    return make("li", {}, file.name + " ", remove);
  }));
}

// Returns a file's text. Throws an Error that says why it is not taken.
async function readText(file) {
  if (file.type.startsWith("image/")) throw new Error(`${file.name}: this server takes no images`);
  if (/^(audio|video)\//.test(file.type)) throw new Error(`${file.name}: this server takes no audio or video`);
  if (file.size > LIMITS.fileSize) throw new Error(`${file.name}: larger than ${LIMITS.fileSize >> 20} MiB`);
  let text;
  try {
    text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name}: not a text in UTF-8`);
  }
  if (text.includes("\0")) throw new Error(`${file.name}: not a text`);
  return text;
}

export async function addFiles(files) {
  const problems = [], read = [];
  for (const file of files) {
    try {
      const isFull = chosen.length + read.length >= LIMITS.files;
      if (isFull) throw new Error(`${file.name}: a message takes ${LIMITS.files} files`);
      read.push({name: file.name, text: await readText(file)});
    } catch (error) {
      problems.push(error.message);
    }
  }
  setFiles([...chosen, ...read]);
  notify(problems.join("; "));
}

export function listenForFiles() {
  const input = byId("choose-files");
  byId("add-files").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await addFiles([...input.files]);
    input.value = ""; // the same file may be chosen again
  });
  const page = byId("page"), hasFiles = event => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", event => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    page.classList.add("drop");
  });
  document.addEventListener("dragleave", event => { if (!event.relatedTarget) page.classList.remove("drop"); });
  document.addEventListener("drop", event => {
    page.classList.remove("drop");
    if (!hasFiles(event)) return;
    event.preventDefault(); // else the browser would leave the page for the file
    addFiles([...event.dataTransfer.files]);
  });
  byId("input").addEventListener("paste", event => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    addFiles([...event.clipboardData.files]);
  });
}
