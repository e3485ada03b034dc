// Markdown, as far as answers use it. Text becomes text nodes alone: what a model writes is never HTML.

// Returns a list of blocks: {tag, parts}, or {tag, start, items} for a list. A part is {tag or null, text}.
export function parseBlocks(text) {
  const blocks = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) blocks.push({tag: "p", parts: parseInline(paragraph.join("\n"))});
    paragraph = [];
  };
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const fence = lines[i].match(/^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)/);
    const heading = lines[i].match(/^(#{1,6}) +(.*)/);
    const item = lines[i].match(/^ *(?:[-*+]|(\d{1,9})[.)]) +(.*)/);
    if (fence) {
      flush();
      const code = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) code.push(lines[i]);
      blocks.push({tag: "pre", language: fence[2], parts: [{tag: "code", text: code.join("\n")}]});
    } else if (heading) {
      flush();
      blocks.push({tag: "p", parts: [{tag: "strong", text: heading[2]}]});
    } else if (item) {
      flush();
      const tag = item[1] === undefined ? "ul" : "ol";
      if (blocks[blocks.length - 1]?.tag !== tag) blocks.push({tag, start: Number(item[1] ?? 1), items: []});
      blocks[blocks.length - 1].items.push(parseInline(item[2]));
    } else if (!lines[i].trim()) {
      flush();
    } else {
      paragraph.push(lines[i]);
    }
  }
  flush();
  return blocks;
}

function parseInline(text) {
  const parts = [];
  const pattern = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*/g;
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > end) parts.push({tag: null, text: text.slice(end, match.index)});
    const n = [1, 2, 3].find(k => match[k] !== undefined);
    parts.push({tag: ["code", "strong", "em"][n - 1], text: match[n]});
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push({tag: null, text: text.slice(end)});
  return parts;
}

function withParts(tag, parts) {
  const element = document.createElement(tag);
  for (const part of parts) {
    if (part.tag === null) {
      element.append(part.text);
    } else {
      const inner = document.createElement(part.tag);
      inner.textContent = part.text;
      element.append(inner);
    }
  }
  return element;
}

function elementOf(block) {
  if (!block.items) return withParts(block.tag, block.parts);
  const list = document.createElement(block.tag);
  if (block.tag === "ol") list.start = block.start;
  list.append(...block.items.map(parts => withParts("li", parts)));
  return list;
}

const shownBlocks = new WeakMap(); // element -> its blocks as text

// Shows a text in `target`. Blocks that did not change since the last call stay: selections and focus survive.
// decorate: returns what stands for the element of a block.
export function render(target, text, decorate = element => element) {
  const blocks = parseBlocks(text), now = blocks.map(block => JSON.stringify(block));
  const before = shownBlocks.get(target) || [];
  let same = 0;
  while (same < now.length && now[same] === before[same]) same++;
  while (target.children.length > same) target.children[target.children.length - 1].remove();
  target.append(...blocks.slice(same).map(block => decorate(elementOf(block), block)));
  shownBlocks.set(target, now);
}
