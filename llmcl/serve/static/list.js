// The list of kept conversations. The shown one has buttons to rename, export and delete it.

import {button, byId, make} from "./elements.js";

// heads: from the store. isBusy: an answer is being written.
// actions: functions open(id), rename(), exportShown(), remove().
export function drawList(heads, shownId, isBusy, actions) {
  const focused = document.activeElement?.closest("#list li")?.dataset.id;
  byId("list").replaceChildren(...heads.map(({id, title, changed}) => {
    const open = button(title, "", () => actions.open(id), "open");
    open.dir = "auto";
    open.title = `${title}\n${new Date(changed).toLocaleString()}`;
    const item = make("li", {}, open), parts = [open];
    item.dataset.id = id;
    if (id === shownId) {
      open.setAttribute("aria-current", "true");
      parts.push(button("Rename", "", actions.rename, "rename"), button("Export", "", actions.exportShown, "export"),
        button("Delete", "", actions.remove, "delete"));
      item.append(make("div", {className: "row"}, ...parts.slice(1)));
    }
    for (const part of parts) part.disabled = isBusy;
    return item;
  }));
  if (focused) byId("list").querySelector(`[data-id="${CSS.escape(focused)}"] .open`)?.focus();
  byId("export-all").disabled = !heads.length;
}
