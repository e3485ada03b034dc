// Files of the message that is being written, chosen, dropped or pasted: texts, and images if the model takes them.

import {LIMITS} from "./conversation.js";
import {button, byId, make, notify} from "./elements.js";
import {isImage, readImage} from "./images.js";

let chosen = [], takesImages = true, adding = Promise.resolve();

// takes: null if unknown; then the server decides.
export function setTakesImages(takes) {
  takesImages = takes ?? true;
  byId("add-files").setAttribute("aria-label", takes ? "Add images or text files" : "Add text files");
}

// Returns once files that were dropped are read.
export function filesRead() {
  return adding;
}

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
    const preview = file.image ? [make("img", {src: file.image, alt: ""})] : [];
    return make("li", {}, ...preview, file.name + " ", remove);
  }));
}

// Returns a file of a message. Throws an Error that says why it is not taken.
async function read(file) {
  const {name} = file;
  if (!isImage(file)) return {name, text: await readText(file)};
  if (!takesImages) throw new Error(`${name}: this model takes no images`);
  return {name, image: await readImage(file)};
}

async function readText(file) {
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

export function addFiles(files) {
  return adding = adding.then(async () => {
    const problems = [];
    for (const file of files) {
      try {
        if (chosen.length >= LIMITS.files) throw new Error(`${file.name}: a message takes ${LIMITS.files} files`);
        const added = await read(file);
        setFiles([...chosen, added]);
      } catch (error) {
        problems.push(error.message);
      }
    }
    notify(problems.join("; "));
  });
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
