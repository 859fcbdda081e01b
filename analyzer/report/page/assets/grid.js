"use strict";
/* A table of any number of rows that sorts, filters and moves by keys; only the rows in sight are in the document.

columns: [{title, unit, values, names?, total?, isHidden?}], values by row; with names, values are places in it.
options: depth (of each row, parents first: a tree whose rows fold), details(row) -> element, label. */
function grid(columns, options = {}) {
  const ROW = 27, MARGIN = 8;
  const count = columns[0].values.length, depth = options.depth ?? null;
  const folded = new Set(), state = { sort: null, descending: true, text: "", rows: [], active: -1 };
  const value = (column, row) => (column.names ? column.names[column.values[row]] : column.values[row]);
  const isText = (column) => column.unit === "text";

  const body = element("tbody"), head = element("tr"), foot = element("tr");
  const table = element("table", { "aria-label": options.label ?? "table", "aria-rowcount": count + 1 },
    element("thead", {}, head), body, ...(columns.some((c) => c.total) ? [element("tfoot", {}, foot)] : []));
  const box = element("div", { class: "grid", tabindex: 0, onscroll: draw, onkeydown: onKey }, table);
  const told = element("span", { class: "note", role: "status" });
  const search = element("input", { type: "search", placeholder: "Filter: text, or e.g. Fwd FLOPs > 1e9", size: 30,
    "aria-label": `Filter ${options.label ?? "rows"}`, oninput: () => { state.text = search.value; update(); } });
  const chooser = columns.some((c) => c.isHidden !== undefined) ? element("details", { class: "chooser" },
    element("summary", {}, "Columns"), ...columns.map((column) => element("label", {}, element("input", {
      type: "checkbox", checked: !column.isHidden, onchange: (event) => { column.isHidden = !event.target.checked; drawHead(); draw(); },
    }), ` ${column.title} `))) : null;
  const detail = element("div", { class: "note", role: "status" });

  const shown = () => columns.filter((column) => !column.isHidden);

  function drawHead() {
    head.replaceChildren(...shown().map((column) => {
      const arrow = state.sort === column ? (state.descending ? " ▼" : " ▲") : "";
      const order = state.sort === column ? (state.descending ? "descending" : "ascending") : "none";
      return element("th", { scope: "col", class: isText(column) ? "text" : null, "aria-sort": order },
        element("button", { type: "button", onclick: () => sortBy(column) }, column.title + arrow));
    }));
    foot.replaceChildren(...shown().map((column) => element("td", { class: isText(column) ? "text" : null }, column.total ?? "")));
  }

  function sortBy(column) {
    if (state.sort !== column) [state.sort, state.descending] = [column, !isText(column)];
    else if (state.descending !== isText(column)) state.descending = !state.descending;
    else state.sort = null;
    drawHead();
    update();
  }

  /* Rows that hold the text in a text column, or whose quantity is so: "Time > 1e-3". */
  function matcher(text) {
    const condition = text.match(/^\s*(.+?)\s*(>=|<=|>|<|=)\s*([\d.eE+-]+)\s*$/);
    const column = condition && columns.find((c) => !isText(c) && c.title.toLowerCase() === condition[1].toLowerCase());
    if (column) {
      const limit = Number(condition[3]);
      const holds = { ">": (v) => v > limit, ">=": (v) => v >= limit, "<": (v) => v < limit, "<=": (v) => v <= limit, "=": (v) => v === limit }[condition[2]];
      return (row) => column.values[row] !== null && holds(column.values[row]);
    }
    const wanted = text.trim().toLowerCase(), texts = columns.filter(isText);
    return (row) => texts.some((c) => String(value(c, row) ?? "").toLowerCase().includes(wanted));
  }

  function update() {
    const all = [...Array(count).keys()];
    let rows = state.text.trim() ? all.filter(matcher(state.text)) : all;
    if (depth && !state.text.trim() && !state.sort) {
      let hiddenBelow = Infinity;
      rows = all.filter((row) => {
        if (depth[row] > hiddenBelow) return false;
        hiddenBelow = folded.has(row) ? depth[row] : Infinity;
        return true;
      });
    }
    if (state.sort) {
      const key = (row) => value(state.sort, row), sign = state.descending ? -1 : 1;
      const known = rows.filter((row) => key(row) !== null), unknown = rows.filter((row) => key(row) === null);
      known.sort((a, b) => (key(a) < key(b) ? -sign : key(a) > key(b) ? sign : a - b));
      rows = [...known, ...unknown];
    }
    state.rows = rows;
    state.active = Math.min(state.active, rows.length - 1);
    told.textContent = rows.length === count ? `${count.toLocaleString("en")} rows` : `${rows.length.toLocaleString("en")} of ${count.toLocaleString("en")} rows`;
    draw();
  }

  function drawRow(place) {
    const row = state.rows[place], isTree = depth && !state.text.trim() && !state.sort;
    const cells = shown().map((column, i) => {
      const text = format(value(column, row), column.unit);
      const cell = element("td", { class: isText(column) ? "text" : null, title: isText(column) ? text : null });
      if (i === 0 && isTree) {
        cell.style.paddingLeft = `${0.4 + depth[row] * 1.1}rem`;
        const isParent = row + 1 < count && depth[row + 1] > depth[row];
        cell.append(isParent ? element("button", { type: "button", class: "toggle", tabindex: -1, "aria-label": folded.has(row) ? "open" : "close",
          onclick: (event) => { event.stopPropagation(); toggle(row); } }, folded.has(row) ? "▸" : "▾") : element("span", { class: "toggle" }));
      }
      cell.append(text);
      return cell;
    });
    return element("tr", { class: place === state.active ? "active" : null, "aria-rowindex": place + 2,
      onclick: () => select(place) }, ...cells);
  }

  function draw(isWhole) {
    const first = isWhole === true ? 0 : Math.max(0, Math.floor(box.scrollTop / ROW) - MARGIN);
    const most = Math.ceil((box.clientHeight || 600) / ROW) + 2 * MARGIN;
    const last = Math.min(state.rows.length, isWhole === true ? 300 : first + most);
    const spacer = (rows) => element("tr", { class: "spacer", "aria-hidden": "true" }, element("td", { colspan: 99, style: `height:${rows * ROW}px` }));
    const rows = [];
    for (let place = first; place < last; place += 1) rows.push(drawRow(place));
    body.replaceChildren(spacer(first), ...rows, spacer(isWhole === true ? 0 : state.rows.length - last));
  }

  function toggle(row) {
    if (!folded.delete(row)) folded.add(row);
    update();
  }

  function select(place) {
    state.active = place;
    draw();
    if (place >= 0 && options.details) detail.replaceChildren(options.details(state.rows[place]));
  }

  function onKey(event) {
    if (event.target !== box) return;
    const page = Math.max(1, Math.floor(box.clientHeight / ROW) - 2), last = state.rows.length - 1;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const row = state.rows[state.active];
    if (event.key in steps) {
      select(Math.max(0, Math.min(last, state.active + steps[event.key])));
      const top = state.active * ROW;
      if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 3 * ROW) box.scrollTop = top - box.clientHeight / 2;
    } else if (depth && row !== undefined && (event.key === "Enter" || event.key === "ArrowLeft" || event.key === "ArrowRight")) toggle(row);
    else return;
    event.preventDefault();
  }

  window.addEventListener("beforeprint", () => draw(true));
  window.addEventListener("afterprint", () => draw());
  if (options.isFolded) for (let row = 0; row < count; row += 1) if (options.isFolded(row)) folded.add(row);
  drawHead();
  update();
  const controls = element("div", { class: "controls" }, search, chooser, told);
  if (depth) controls.append(element("button", { type: "button", onclick: () => { folded.clear(); update(); } }, "Open all"));
  return { element: element("div", {}, controls, box, detail), show: (text) => { search.value = state.text = text; update(); },
    select: (row) => { const place = state.rows.indexOf(row); if (place >= 0) { select(place); box.scrollTop = place * ROW - box.clientHeight / 2; } } };
}
