// The page: the shown conversation, what its controls do, and when it is stored.

import {writeAnswer} from "./answer.js";
import {append, choose, chosenPath, newConversation, titleOf} from "./conversation.js";
import {byId, download, notify, question, recall, remember} from "./elements.js";
import {exportText, importText} from "./exchange.js";
import {clearFigures, contextText, showContext} from "./figures.js";
import {filesRead, listenForFiles, setFiles, setTakesImages, takeFiles} from "./files.js";
import {drawList} from "./list.js";
import {modelFacts} from "./server.js";
import {apiKey, chosenModel, loadSettings, openSettings, showModels, systemPrompt} from "./settings.js";
import {openStore} from "./store.js";
import {View} from "./view.js";

const SHOWN = "llmcl-shown", MODEL = "llmcl-model", SAVE_MS = 1000, MAX_IMPORT = 256 << 20;

const state = {conversation: null, running: -1, editing: -1, context: 0};
const view = new View({edit: ifIdle(edit), retry: ifIdle(retry), goOn: ifIdle(answer), choose: ifIdle(chooseVersion)});
const listActions = {open, rename, exportShown, remove};
const otherWindows = new BroadcastChannel("llmcl");
let store = null, heads = [], aborter = null, saving = Promise.resolve(), saveTimer = 0;
let draft = {text: "", files: []}; // what was being written when an edit began

// ---- drawing ----

function draw() {
  const isBusy = state.running >= 0, path = chosenPath(state.conversation), {messages} = state.conversation;
  view.draw(state);
  drawList(heads, state.conversation.id, isBusy, listActions);
  byId("send").disabled = byId("fresh").disabled = byId("import").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  showContext(path.reduce((used, index) => messages[index].used || used, 0), state.context);
}

function isAtEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function scrollToEnd() {
  byId("log").scrollTop = byId("log").scrollHeight;
}

async function showModel() {
  try {
    const {name, context, images, names} = await modelFacts(apiKey(), chosenModel() || recall("localStorage", MODEL));
    showModels(names, name);
    byId("name").textContent = name;
    byId("context").textContent = context ? contextText(context) : "not loaded";
    document.title = "llmcl: " + name;
    state.context = context;
    setTakesImages(images);
    if (state.running < 0) draw();
  } catch (error) {
    byId("name").textContent = error instanceof TypeError ? "the server does not answer" : error.message;
    if (error.isLoading) setTimeout(showModel, 1000);
  }
}

// ---- the store ----

function saveSoon() {
  document.body.dataset.stored = false;
  saveTimer ||= setTimeout(save, SAVE_MS);
}

// Stores the conversation, after earlier calls have ended.
function save() {
  const {conversation} = state;
  clearTimeout(saveTimer);
  saveTimer = 0;
  document.body.dataset.stored = false;
  const mine = saving = saving.then(async () => {
    if (!store) return;
    try {
      await store.put(conversation);
      if (conversation === state.conversation) remember("sessionStorage", SHOWN, conversation.id);
      otherWindows.postMessage(conversation.id);
      await drawHeads();
    } catch (error) {
      notify("not kept: " + error.message);
    }
    document.body.dataset.stored = saving === mine;
  });
  return saving;
}

async function drawHeads() {
  heads = await store.list();
  drawList(heads, state.conversation.id, state.running >= 0, listActions);
}

function touch() {
  state.conversation.changed = Date.now();
  return save();
}

async function onOtherWindow(id) {
  if (!store) return;
  await drawHeads();
  const head = heads.find(one => one.id === id), {conversation} = state;
  if (state.running >= 0 || id !== conversation.id || !head || head.version <= conversation.version) return;
  state.conversation = await store.get(id);
  draw();
}

// ---- conversations ----

function show(conversation) {
  state.conversation = conversation;
  endEditing();
  notify("");
  clearFigures();
  draw();
  scrollToEnd();
  showSide(false);
}

async function open(id) {
  const conversation = await store.get(id);
  if (!conversation) return await drawHeads();
  remember("sessionStorage", SHOWN, id);
  show(conversation);
  byId("list").querySelector("[aria-current]")?.focus();
}

function startNew() {
  remember("sessionStorage", SHOWN, "");
  show(newConversation(systemPrompt()));
  byId("input").focus();
}

async function rename() {
  const title = await question("Title of the conversation", "Rename", titleOf(state.conversation));
  if (!title) return;
  state.conversation.title = title;
  await save();
}

function exportShown() {
  download("conversation.json", exportText([state.conversation]));
}

async function exportAll() {
  const all = await Promise.all(heads.map(head => store.get(head.id)));
  download("conversations.json", exportText(all.filter(Boolean)));
}

async function remove() {
  const {id} = state.conversation;
  if (!await question(`Delete \u201c${titleOf(state.conversation)}\u201d?`, "Delete")) return;
  await saving;
  await store.remove(id);
  otherWindows.postMessage(id);
  startNew();
  await drawHeads();
}

async function importFiles(files) {
  notify("");
  for (const file of files) {
    try {
      if (file.size > MAX_IMPORT) throw new Error(`larger than ${MAX_IMPORT >> 20} MiB`);
      for (const conversation of importText(await file.text())) await store.put(conversation);
    } catch (error) {
      notify(`${file.name}: ${error.message}`);
    }
  }
  otherWindows.postMessage("");
  await drawHeads();
}

// ---- messages ----

function ifIdle(action) {
  return (...values) => { if (state.running < 0) action(...values); };
}

// Writes the answer `index`; one that was cut goes on.
async function answer(index) {
  const {conversation} = state;
  state.running = index;
  notify("");
  aborter = new AbortController();
  draw();
  scrollToEnd();
  if (document.activeElement === document.body) byId("log").focus(); // the button that was used is gone
  let problem = "";
  touch();
  try {
    await writeAnswer(conversation, index, aborter.signal, () => {
      const wasAtEnd = isAtEnd();
      view.update(conversation.messages[index], index);
      if (wasAtEnd) scrollToEnd();
      saveSoon();
    });
  } catch (error) {
    problem = error.message;
  }
  const wasAtEnd = isAtEnd();
  state.running = -1;
  draw();
  if (problem) view.showError(problem);
  if (wasAtEnd || problem) scrollToEnd();
  touch();
  if (!state.context) showModel(); // the answer has loaded the model
}

async function send() {
  await filesRead();
  const input = byId("input"), text = input.value, {conversation, editing} = state;
  if (state.running >= 0 || (!text.trim() && !byId("files").children.length)) return;
  const path = chosenPath(conversation);
  const parent = editing >= 0 ? conversation.messages[editing].parent : path.length ? path[path.length - 1] : -1;
  const asked = append(conversation, parent, "user", text, takeFiles());
  input.value = "";
  endEditing();
  answer(append(conversation, asked, "assistant", ""));
}

function edit(index) {
  if (index === state.editing) return leaveEditing();
  const {text, files} = state.conversation.messages[index];
  if (state.editing < 0) draft = {text: byId("input").value, files: takeFiles()};
  state.editing = index;
  byId("input").value = text;
  setFiles(files);
  notify("Editing: Send adds a version of the message, Cancel leaves it as it is.", "");
  draw();
  byId("input").focus();
}

function endEditing() {
  if (state.editing < 0) return;
  state.editing = -1;
  byId("input").value = draft.text;
  setFiles(draft.files);
}

function leaveEditing() {
  endEditing();
  notify("");
  draw();
}

// Answers the message `asked` once more. An answer that ended before its first word is no version to keep.
function retry(asked) {
  endEditing();
  const {conversation} = state, last = conversation.messages[asked].child;
  const {text, thoughts, child} = conversation.messages[last] || {};
  answer(text === "" && thoughts === "" && child < 0 ? last : append(conversation, asked, "assistant", ""));
}

function chooseVersion(index, button) {
  if (state.editing >= 0) leaveEditing(); // its message may be hidden now
  choose(state.conversation, index);
  draw();
  const usable = [...byId("log").querySelectorAll(`[data-index="${index}"] :is(.previous, .next):enabled`)];
  (usable.find(arrow => arrow.classList.contains(button)) || usable[0]).focus();
  save();
}

// ---- controls ----

function showSide(is) {
  byId("side").classList.toggle("shown", is);
  byId("open-side").setAttribute("aria-expanded", is);
}

function onEscape() {
  if (document.querySelector("dialog[open]")) return; // the browser closes it
  if (byId("side").classList.contains("shown")) {
    showSide(false);
    byId("open-side").focus();
  } else if (state.running >= 0) {
    aborter.abort();
  } else if (state.editing >= 0) {
    leaveEditing();
  }
}

function listen() {
  const on = (id, action) => byId(id).addEventListener("click", action);
  byId("ask").addEventListener("submit", event => { event.preventDefault(); send(); });
  byId("input").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  document.addEventListener("keydown", event => { if (event.key === "Escape" && !event.isComposing) onEscape(); });
  on("stop", () => aborter?.abort());
  on("fresh", startNew);
  on("open-side", () => showSide(!byId("side").classList.contains("shown")));
  on("open-settings", () => openSettings(state.conversation.system, () => {
    if (systemPrompt() !== state.conversation.system) {
      state.conversation.system = systemPrompt();
      if (state.conversation.messages.length) save();
    }
    showModel();
  }));
  byId("models").addEventListener("change", () => {
    remember("localStorage", MODEL, chosenModel());
    showModel();
  });
  on("export-all", exportAll);
  on("import", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async () => {
    await importFiles([...byId("import-file").files]);
    byId("import-file").value = "";
  });
  document.addEventListener("visibilitychange", () => { if (saveTimer) save(); }); // a hidden page may be ended
  otherWindows.addEventListener("message", event => onOtherWindow(event.data));
  listenForFiles();
}

async function start() {
  loadSettings();
  state.conversation = newConversation(systemPrompt());
  let problem = "";
  try {
    store = await openStore();
    heads = await store.list();
    const shown = recall("sessionStorage", SHOWN);
    state.conversation = shown && await store.get(shown) || state.conversation;
  } catch (error) {
    store = null;
    problem = "this browser keeps no conversations: " + error.message;
  }
  byId("side").hidden = !store;
  byId("open-side").hidden = !store;
  listen();
  show(state.conversation);
  notify(problem);
  byId("input").focus();
  showModel();
}

start();
