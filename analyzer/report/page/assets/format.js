"use strict";
/* Quantities as text, by the rules of analyzer.units: the page and the tables of the package print the same. */
const drawings = {};  // how each kind of part is drawn: (element, data, id)
const units = (() => {
  const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const DECIMAL = ["", "K", "M", "G", "T", "P", "E"], SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"]];

  function scale(value, base, labels) {
    let power = 0;
    while (power + 1 < labels.length && Math.round(Math.abs(value) / base ** power * 100) / 100 >= base) power += 1;
    if (power === 0 && Number.isInteger(value)) return `${value} ${labels[0]}`.trimEnd();
    return `${(value / base ** power).toFixed(2)} ${labels[power]}`.trimEnd();
  }
  function seconds(value) {
    if (value === 0) return "0 s";
    for (const [size, label] of SECONDS) {
      if (Math.round(Math.abs(value) / size * 1000 * 100) / 100 >= 1000) return `${(value / size).toFixed(2)} ${label}`;
    }
    return `${(value * 1e9).toFixed(2)} ns`;
  }
  function share(value) {
    const percent = 100 * value;
    if (!percent) return "0 %";
    if (percent < 0.01) return "< 0.01 %";
    return `${percent < 1 ? String(Number(percent.toPrecision(2))) : percent.toFixed(1)} %`;
  }
  const formats = {
    bytes: (v) => scale(v, 1024, BINARY), count: (v) => scale(v, 1000, DECIMAL),
    rate: (v) => `${scale(v, 1000, DECIMAL)}FLOP/s`, seconds, share, text: String, number: (v) => v.toLocaleString("en"),
  };
  return { format: (value, unit) => (value === null || value === undefined ? "-" : formats[unit](value)) };
})();
const format = units.format;

/* An element with attributes and children; text is text and never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/* The end of a path, which says which file it is. */
const shortPath = (path) => path.split(/[\\/]/).slice(-3).join("/");

/* Text for plotly's labels, which know a few tags of HTML. */
const escapeLabel = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/* A label of plotly's as plain text, its lines behind each other. */
const readLabel = (label) => new DOMParser().parseFromString(label.replaceAll("<br>", ", "), "text/html").body.textContent;

function selectBox(label, options, chosen, changed) {
  const select = element("select", { onchange: () => changed(select.value) },
    ...options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
  return element("label", {}, `${label} `, select);
}
