// Elements of the page. Whatever comes from a run's folder becomes a text node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

export const html = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

export function picture(width, height, label, ...children) {
  return svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...children,
  );
}

export function text(x, y, content, attributes) {
  return svg("text", { x, y, ...attributes }, String(content));
}

export const title = (content) => svg("title", null, String(content));

export function replace(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

// What is read out when it changes is only written when it does.
export function say(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

export const nothing = (words) => html("p", { class: "empty" }, words);

// Text is as wide as its letters; a little more than that is enough to know what fits.
export const widthOf = (content, size = 12) => String(content).length * size * 0.56;

export function fitted(content, width, size = 12) {
  const letters = Math.floor(width / (size * 0.56));
  const whole = String(content);
  if (whole.length <= letters) return whole;
  if (letters < 3) return "";
  const head = Math.floor((letters - 1) / 2); // the ends of names differ: pi-1, pi-2
  return `${whole.slice(0, head)}…${whole.slice(whole.length - (letters - 1 - head))}`;
}

export const widthFor = (element, least = 200) => Math.max(least, Math.floor(element.clientWidth || least));
