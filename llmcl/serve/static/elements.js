// Small helpers for the page's elements.

export const byId = id => document.getElementById(id);

// Makes an element with properties and children. Strings become text.
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(text, label, onClick, name = "") {
  const element = make("button", {type: "button", className: name, textContent: text});
  if (label && label !== text) element.setAttribute("aria-label", label);
  element.addEventListener("click", onClick);
  return element;
}

// Says something to the user, also through a screen reader. "" takes it away. kind: "bad" for a problem, or "".
export function notify(text, kind = "bad") {
  byId("notice").textContent = text;
  byId("notice").className = kind;
}

// A button that copies the text that `read` returns.
export function copyButton(label, read) {
  const element = button("Copy", label, async () => {
    element.textContent = await copy(read()) ? "Copied" : "Not copied";
    setTimeout(() => { element.textContent = "Copy"; }, 1500);
  }, "copy");
  return element;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without https, navigator.clipboard is missing on other machines.
    const area = make("textarea", {value: text}), before = document.activeElement;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    before?.focus();
    return copied;
  }
}

// Text in localStorage or sessionStorage. Browsers that keep nothing throw there.
export function recall(area, name) {
  try {
    return window[area].getItem(name);
  } catch {
    return null;
  }
}

export function remember(area, name, text) {
  try {
    window[area].setItem(name, text);
  } catch {
    // then it holds until the page is closed
  }
}

// Asks in a dialog. Without `value`: returns whether the answer was yes. With it: returns the text, or null.
export function question(text, yes, value) {
  const dialog = byId("question"), input = byId("question-input");
  byId("question-text").textContent = text;
  byId("question-yes").textContent = yes;
  input.hidden = value === undefined;
  input.value = value ?? "";
  byId("question-no").onclick = () => dialog.close("");
  dialog.returnValue = "";
  dialog.showModal();
  if (value === undefined) byId("question-no").focus(); else input.select();
  return new Promise(resolve => {
    dialog.onclose = () => {
      if (dialog.open) return; // the event is from a question before this one
      const agreed = dialog.returnValue === "yes";
      resolve(value === undefined ? agreed : agreed ? input.value.trim() : null);
    };
  });
}

// Lets the browser save a text as a file.
export function download(name, text) {
  const link = make("a", {download: name, href: URL.createObjectURL(new Blob([text], {type: "application/json"}))});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
