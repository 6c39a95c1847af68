// Creates nodes and patches the tree in place: focus, scroll position and typed text stay.
// Text only becomes text nodes and attributes; nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "open", "indeterminate"]);
const handlers = new WeakMap();

/** An HTML element. Attributes: `on` {event: function}, `key` (which sibling it is), others as they are; null or false leaves one out. */
export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") listen(node, value);
    else if (name === "key") node.key = String(value);
    else if (value === null || value === undefined || value === false) continue;
    else if (PROPERTIES.has(name) && name in node) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function listen(node, wanted) {
  const known = handlers.get(node) || {};
  for (const name of Object.keys(wanted)) {
    if (!(name in known)) node.addEventListener(name, (event) => handlers.get(node)[name]?.(event));
  }
  handlers.set(node, { ...Object.fromEntries(Object.keys(known).map((name) => [name, undefined])), ...wanted });
}

/** Text with `commands` in it, rendered as code. */
export const formatText = (text) => String(text).split("`").map((part, n) => (n % 2 ? h("code", {}, part) : part));

/** Make the children of `parent` look like `children`, changing as little as possible. */
export function render(parent, ...children) {
  const wanted = document.createDocumentFragment();
  append(wanted, children);
  morphChildren(parent, wanted);
}

/** Make `old` look like `fresh`; returns the node that is in the page afterwards. */
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.key !== fresh.key) {
    old.replaceWith(fresh);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return old;
  }
  const userControlled = (name) => name === "open" && old.nodeName === "DETAILS"; // the user opens and closes these
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !userControlled(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value && !userControlled(name)) old.setAttribute(name, value);
  if (handlers.has(old) || handlers.has(fresh)) listen(old, handlers.get(fresh) || {});
  morphChildren(old, fresh);
  for (const name of PROPERTIES) {
    if (name in old && name in fresh && old[name] !== fresh[name] && !userControlled(name)) {
      old[name] = fresh[name];
    }
  }
  return old;
}

function morphChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.childNodes) if (child.key !== undefined) keyed.set(child.key, child);
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    let match = place;
    if (child.key !== undefined) match = keyed.get(child.key) || null;
    else while (match && match.key !== undefined) match = match.nextSibling;
    if (match && match.nodeName === child.nodeName) {
      if (match !== place) old.insertBefore(match, place);
      else place = place.nextSibling;
      morph(match, child);
    } else old.insertBefore(child, place);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}
