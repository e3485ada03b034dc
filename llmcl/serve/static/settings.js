// The settings dialog. Settings stay in this browser; the API key stays until the tab is closed.

import {byId, make, recall, remember} from "./elements.js";

export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "max_tokens"];
const KEPT = [...NUMBERS, "reasoning_effort", "system"], STORED = "llmcl-settings", KEY = "llmcl-key";

export function apiKey() {
  return byId("key").value;
}

export function systemPrompt() {
  return byId("system").value;
}

// Returns the chosen model; empty if the server has one only.
export function chosenModel() {
  return byId("models").value;
}

// Shows a choice of models, if there are several.
export function showModels(names, chosen) {
  const list = byId("models");
  list.replaceChildren(...names.map(name => make("option", {textContent: name, selected: name === chosen})));
  list.hidden = !names.length;
  byId("name").hidden = !list.hidden;
}

// Returns the request's fields. Empty settings are left to the server.
export function requestFields() {
  const fields = NUMBERS.filter(name => byId(name).value !== "").map(name => [name, Number(byId(name).value)]);
  const effort = byId("reasoning_effort").value;
  return {...Object.fromEntries(fields), ...(effort ? {reasoning_effort: effort} : {}), ...(chosenModel() ? {model: chosenModel()} : {})};
}

export function loadSettings() {
  byId("key").value = recall("sessionStorage", KEY) || "";
  const stored = JSON.parse(recall("localStorage", STORED) || "{}");
  for (const name of KEPT) if (typeof stored[name] === "string") byId(name).value = stored[name];
}

// Opens the dialog with a conversation's system prompt; then calls `onClose`.
export function openSettings(system, onClose) {
  const dialog = byId("settings");
  byId("system").value = system;
  dialog.showModal();
  dialog.addEventListener("close", () => {
    remember("sessionStorage", KEY, apiKey());
    remember("localStorage", STORED, JSON.stringify(Object.fromEntries(KEPT.map(name => [name, byId(name).value]))));
    onClose();
  }, {once: true});
}
