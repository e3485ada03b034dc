// Shows the chosen messages of a conversation.

import {chosenPath, versions} from "./conversation.js";
import {button, byId, copyButton, make} from "./elements.js";
import {render} from "./markdown.js";

const NAMES = {user: "You", assistant: "Answer"};

// actions: functions of a message's index: edit, retry, goOn, choose.
// state: {conversation, running: index or -1, editing: index or -1, context}.
export class View {
  constructor(actions) {
    this.actions = actions;
    this.bodies = new Map(); // index -> the parts of an answer that change while it is written
    this.shown = new Map(); // what a message looks like, as text -> its element
  }

  // Messages that look as before keep their elements: a screen reader says new ones alone, and focus stays.
  draw(state) {
    const log = byId("log"), path = chosenPath(state.conversation), before = this.shown;
    log.setAttribute("aria-busy", state.running >= 0); // a screen reader waits for the whole answer
    this.shown = new Map(path.map(index => {
      const look = this.look(state, index);
      return [look, before.get(look) || this.message(state, index)];
    }));
    const elements = [...this.shown.values()], last = path[path.length - 1];
    if (state.running < 0 && last !== undefined && state.conversation.messages[last].role === "user") {
      const again = button("Retry", "Ask for an answer", () => this.actions.retry(last), "retry");
      elements.push(make("div", {className: "row tools"}, again));
    }
    for (const element of [...log.children]) if (!elements.includes(element)) element.remove();
    elements.forEach((element, i) => {
      if (log.children[i] !== element) log.insertBefore(element, log.children[i] || null);
    });
  }

  look({conversation, running, editing, context}, index) {
    const {text, thoughts, end, child} = conversation.messages[index], all = versions(conversation, index);
    const isRunning = index === running, goesOn = running < 0 && child < 0 && end !== "stop";
    const flags = [isRunning, goesOn, index === editing];
    return JSON.stringify([conversation.id, index, text.length, thoughts.length, end, all, flags, context]);
  }

  message(state, index) {
    const message = state.conversation.messages[index];
    const element = make("article", {className: "message " + message.role});
    element.dataset.index = index;
    element.setAttribute("aria-label", NAMES[message.role]);
    if (index === state.editing) element.classList.add("edited");
    if (message.role === "user") {
      for (const file of message.files) element.append(shownFile(file));
      element.append(make("div", {className: "text"}, make("p", {dir: "auto", textContent: message.text})));
    } else {
      const thought = make("div"), said = make("div", {className: "text", dir: "auto"});
      const thoughts = make("details", {className: "thoughts"}, make("summary", {textContent: "Thoughts"}), thought);
      element.append(thoughts, said);
      this.bodies.set(index, {thoughts, thought, said});
      this.update(message, index);
      if (index !== state.running) element.append(...this.mark(state, message, index));
    }
    element.append(this.tools(state, message, index));
    return element;
  }

  // Shows what an answer has so far.
  update(message, index) {
    const {thoughts, thought, said} = this.bodies.get(index);
    thoughts.hidden = !message.thoughts;
    thought.textContent = message.thoughts;
    render(said, message.text, withCopy);
  }

  // Says where an answer was cut, with a button that goes on.
  mark({conversation, context, running}, message, index) {
    if (message.end === "stop") return [];
    const isFull = message.end === "length" && context && message.used >= context;
    const why = isFull ? "The context is full." : message.end === "length" ? "Cut off at the limit of tokens."
      : message.end === "failed" ? "Broken off by an error." : "Stopped.";
    const row = make("div", {className: "row mark"}, make("span", {textContent: why}));
    if (running < 0 && !isFull && message.text && message.child < 0) {
      row.append(button("Go on", "Go on with this answer", () => this.actions.goOn(index), "go-on"));
    }
    return [row];
  }

  tools({conversation, editing}, message, index) {
    const row = make("div", {className: "row tools"}), all = versions(conversation, index), n = all.indexOf(index);
    if (all.length > 1) {
      const arrow = (text, label, other, name) => {
        const element = button(text, label, () => this.actions.choose(other, name), name);
        element.disabled = other === undefined;
        return element;
      };
      const count = make("span", {textContent: `${n + 1}/${all.length}`});
      count.setAttribute("aria-label", `Version ${n + 1} of ${all.length}`);
      row.append(arrow("\u2039", "Previous version", all[n - 1], "previous"), count);
      row.append(arrow("\u203a", "Next version", all[n + 1], "next"));
    }
    row.append(copyButton("Copy message", () => conversation.messages[index].text));
    const [word, label] = index === editing ? ["Cancel", "Cancel editing"] : ["Edit", "Edit message"];
    row.append(message.role === "user" ? button(word, label, () => this.actions.edit(index), "edit")
      : button("Retry", "Answer again", () => this.actions.retry(message.parent), "retry"));
    return row;
  }

  showError(text) {
    byId("log").append(make("div", {className: "message error", role: "alert", textContent: text}));
  }
}

function shownFile({name, text, image}) {
  if (image) return make("img", {src: image, alt: name, title: name, className: "picture"});
  return folded(`${name} (${text.length} characters)`, text);
}

function folded(title, text) {
  return make("details", {}, make("summary", {textContent: title}), make("div", {textContent: text}));
}

// A block of code gets a line with its language and a button that copies it.
function withCopy(element, block) {
  if (block.tag !== "pre") return element;
  element.tabIndex = 0; // so that the keyboard scrolls it
  const copy = copyButton("Copy code", () => block.parts[0].text);
  const line = make("div", {className: "row"}, make("span", {textContent: block.language}), copy);
  return make("div", {className: "code"}, line, element);
}
