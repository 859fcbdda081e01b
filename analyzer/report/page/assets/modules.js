"use strict";
/* The module tree: an icicle or a treemap of one quantity, with drill-down by clicks, and a table of all quantities. */
drawings.modules = (box, data) => {
  const CHARTED = 7, LEVELS = 5, count = data.name.length;
  const parents = [], stack = [];
  for (let i = 0; i < count; i += 1) {
    stack.length = data.depth[i];
    parents.push(i === 0 ? "" : String(stack[data.depth[i] - 1]));
    stack[data.depth[i]] = i;
  }
  const isLeaf = (i) => i + 1 === count || data.depth[i + 1] <= data.depth[i];
  const titles = data.name.map((name, i) => (data.type[i] && data.type[i] !== name ? `${name} (${data.type[i]})` : name));
  const charted = data.quantities.slice(0, CHARTED);
  const state = { quantity: charted[0], shape: "icicle", level: "0" };
  const ids = data.name.map((_, i) => String(i));

  const chart = element("div", { class: "chart", role: "img", style: "height:26rem", "aria-label": "Modules by cost; the table below has the same figures" });
  function draw() {
    const { values, unit, title } = state.quantity, total = values[0];
    const told = ids.map((_, i) => `${escapeLabel(data.path[i] ?? `${data.path[Number(parents[i])]} ${data.name[i]}`)}<br>${title} ${format(values[i], unit)}${total && values[i] !== null ? `, ${format(values[i] / total, "share")}` : ""}`);
    Plotly.react(chart, [{
      type: state.shape, ids, labels: titles.map(escapeLabel), parents, values: values.map((v, i) => (isLeaf(i) ? v ?? 0 : 0)), branchvalues: "remainder",
      customdata: ids, level: state.level, maxdepth: LEVELS, text: values.map((v) => format(v, unit)), textinfo: "label+text", hovertext: told, hoverinfo: "text",
      sort: false, tiling: state.shape === "icicle" ? { orientation: "v" } : { packing: "squarify" }, pathbar: { visible: true },
      marker: { colorscale: [[0, theme.color("card")], [1, theme.color("mark")]], colors: values.map((v) => (total && v ? Math.sqrt(v / total) : 0)), line: { color: theme.color("paper"), width: 1 } },
    }], theme.layout({ margin: { l: 4, r: 4, t: 28, b: 4 } }), chartOptions);
  }
  function go(row) {
    state.level = String(row);
    draw();
  }

  const unknown = () => (state.quantity.values[0] === null ? "Some modules are unknown and not drawn." : "");
  const told = element("span", { class: "note" }, unknown());
  const list = element("datalist", { id: "module-paths" }, ...data.path.filter((path) => path).slice(0, 2000).map((path) => element("option", { value: path })));
  const search = element("input", { type: "search", size: 34, placeholder: "Go to a module: layers.0.mlp", list: "module-paths", "aria-label": "Go to a module", onchange: () => {
    const text = search.value.trim(), found = text === "" ? 0 : data.path.indexOf(text) >= 0 ? data.path.indexOf(text) : data.path.findIndex((path) => path && path.includes(text));
    if (found >= 0) { go(found); table.select(found); } else told.textContent = `no module has ${text} in its path`;
  } });
  box.append(element("div", { class: "controls" },
    selectBox("By", charted.map((q) => [q.title, q.title]), state.quantity.title, (chosen) => { state.quantity = charted.find((q) => q.title === chosen); told.textContent = unknown(); draw(); }),
    selectBox("As", [["icicle", "icicle"], ["treemap", "treemap"]], "icicle", (chosen) => { state.shape = chosen; draw(); }),
    search, list, element("button", { type: "button", onclick: () => go(0) }, "Whole model"), told), chart);
  const deepFolded = (row) => data.depth[row] >= 1 && !isLeaf(row);
  const table = grid([{ title: "Module", unit: "text", values: titles }, { title: "Path", unit: "text", values: data.path.map((path) => path ?? ""), isHidden: true },
    { title: "Calls", unit: "number", values: data.calls }, ...data.quantities], { depth: data.depth, label: "modules", isFolded: count > 40 ? deepFolded : undefined });
  box.append(table.element);
  draw();
  theme.follow(draw);
  chart.on("plotly_click", (event) => { const row = event.points[0].customdata; state.level = String(event.nextLevel ?? row); table.select(Number(row)); });
};
