"use strict";
/* The module tree: an icicle or a treemap of one quantity, with drill-down by clicks, and a table of all quantities. */
drawings.modules = (box, data, id) => {
  const CHARTED = 7, LEVELS = 5, LEAST = 0.004, MOST = 60, count = data.name.length;
  const parent = [], children = data.name.map(() => []), open = [];
  for (let i = 0; i < count; i += 1) {
    open[data.depth[i]] = i;
    parent.push(i ? open[data.depth[i] - 1] : null);
    if (i) children[parent[i]].push(i);
  }
  const titles = data.name.map((name, i) => (data.type[i] && data.type[i] !== name ? `${name} (${data.type[i]})` : name));
  const pathOf = (i) => data.path[i] ?? `${data.path[parent[i]]} ${data.name[i]}`.trim();
  const charted = data.quantities.slice(0, CHARTED);
  const state = { quantity: charted[0], shape: "icicle", root: 0 };

  /* Slices below a module, so many levels deep. What is too small to be seen stands together with its neighbours. */
  function slices() {
    const { values, unit, title } = state.quantity, whole = values[state.root] ?? 0, total = values[0];
    const made = { ids: [], labels: [], parents: [], values: [], hovertext: [], colors: [], text: [] };
    const add = (id, above, label, value, isLast, told) => {
      made.ids.push(id); made.parents.push(above); made.labels.push(escapeLabel(label)); made.values.push(isLast ? value : 0);
      made.text.push(format(value, unit)); made.colors.push(whole ? Math.sqrt(value / whole) : 0);
      made.hovertext.push(`${escapeLabel(told)}<br>${title} ${format(value, unit)}${total ? `, ${format(value / total, "share")} of the model` : ""}`);
    };
    const waiting = [[state.root, "", 0]];
    while (waiting.length) {
      const [i, above, depth] = waiting.pop(), value = values[i] ?? 0;
      const known = depth + 1 < LEVELS ? children[i].filter((c) => values[c]) : [];
      add(String(i), above, titles[i], value, !known.length, `${pathOf(i)} ${data.type[i]}`);
      const shown = new Set(depth ? [] : [...known].sort((a, b) => values[b] - values[a]).slice(0, MOST));
      const small = known.filter((c) => values[c] < LEAST * whole && !shown.has(c));
      for (const c of known.toReversed()) if (!small.includes(c)) waiting.push([c, String(i), depth + 1]);
      if (small.length) {
        const sum = small.reduce((s, c) => s + values[c], 0), names = [...new Set(small.map((c) => data.type[c] || data.name[c]))];
        add(`${i}+`, String(i), `${small.length} small: ${names.slice(0, 3).join(", ")}`, sum, true, `${small.length} modules in ${pathOf(i)}; click to see them`);
      }
    }
    return made;
  }

  const chart = element("div", { class: "chart", role: "img", style: "height:26rem", "aria-label": "Modules by cost; the table below has the same figures" });
  const crumbs = element("nav", { class: "crumbs", "aria-label": "Modules above" }), told = element("span", { class: "note", role: "status" });
  function draw() {
    const { colors, ...made } = slices();
    Plotly.react(chart, [{ type: state.shape, ...made, branchvalues: "remainder", textinfo: "label+text", hoverinfo: "text", sort: false,
      ...(state.shape === "icicle" ? { tiling: { orientation: "v" } } : {}), pathbar: { visible: false },
      marker: { colors, colorscale: [[0, theme.color("card")], [1, theme.color("mark")]], line: { color: theme.color("paper"), width: 1 } },
    }], theme.layout({ margin: { l: 4, r: 4, t: 4, b: 4 }, uniformtext: { minsize: 9, mode: "hide" } }), chartOptions);
    const above = [];
    for (let i = state.root; i !== null; i = parent[i]) above.unshift(i);
    crumbs.replaceChildren(...above.map((i) => element("button", { type: "button", "aria-current": i === state.root ? "true" : null, onclick: () => go(i) }, titles[i])));
    told.textContent = state.quantity.values[0] === null ? "Of some modules it is not known; these are not drawn." : "";
  }
  function go(row) {
    state.root = children[row].length ? row : parent[row] ?? 0;
    draw();
  }

  const list = element("datalist", { id: `${id}-paths` }, ...data.path.filter((path) => path).slice(0, 1000).map((path) => element("option", { value: path })));
  const search = element("input", { type: "search", size: 34, placeholder: "Go to a module: layers.0.mlp", list: `${id}-paths`, "aria-label": "Go to a module", onchange: () => {
    const text = search.value.trim(), exact = data.path.indexOf(text), found = exact >= 0 ? exact : data.path.findIndex((path) => path && path.includes(text));
    if (found >= 0) { go(found); table.select(found); } else told.textContent = `no module has ${text} in its path`;
  } });
  const table = grid([{ title: "Module", unit: "text", values: titles }, { title: "Path", unit: "text", values: data.path.map((path) => path ?? ""), isHidden: true },
    { title: "Calls", unit: "number", values: data.calls }, ...data.quantities], { depth: data.depth, label: "modules",
    isFolded: count > 40 ? (row) => data.depth[row] >= 1 && children[row].length > 0 : undefined });
  if (!state.quantity) {  // none that is known, or is not nothing
    box.append(table.element);
    return;
  }
  box.append(element("div", { class: "controls" },
    selectBox("By", charted.map((q) => [q.title, q.title]), state.quantity.title, (chosen) => { state.quantity = charted.find((q) => q.title === chosen); draw(); }),
    selectBox("As", [["icicle", "icicle"], ["treemap", "treemap"]], "icicle", (chosen) => { state.shape = chosen; draw(); }),
    search, list, told), crumbs, chart, table.element);
  draw();
  theme.follow(draw);
  chart.on("plotly_click", (event) => {
    const row = Number.parseInt(event.points[0].id, 10);
    go(row);
    table.select(row);
  });
  for (const kind of ["plotly_icicleclick", "plotly_treemapclick"]) chart.on(kind, () => false);  // the page goes there itself
};
