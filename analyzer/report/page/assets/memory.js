"use strict";
/* Memory over the step: a stacked area by category; a click, or the arrow keys, choose a moment, and the panel beside it
lists who holds memory then. Categories and holders at each moment are sums of the blocks alive then. */
drawings.memory = (box, data) => {
  const SHOWN = 1500;  // points of a stacked area that a browser draws at once; a zoom shows what is between
  const { points, blocks, holders, categories } = data, count = points.allocated.length;
  const hasTime = points.seconds.every((s) => s !== null) && points.seconds[count - 1] > points.seconds[0];
  const peak = points.allocated.indexOf(Math.max(...points.allocated));
  const state = { moment: peak, byTime: false, range: null, grouping: "holder" };

  const stacks = categories.map(() => new Float64Array(count + 1));
  for (let i = 0; i < blocks.holder.length; i += 1) {
    const stack = stacks[holders.category[blocks.holder[i]]];
    stack[blocks.born[i]] += blocks.bytes[i];
    stack[blocks.freed[i]] -= blocks.bytes[i];
  }
  for (const stack of stacks) for (let i = 1; i <= count; i += 1) stack[i] += stack[i - 1];

  const place = (i) => (state.byTime ? points.seconds[Math.min(i, count - 1)] : i);
  const label = (i) => data.labels[points.label[i]], phase = (i) => data.phases[points.phase[i]];

  /* Of the moments in sight, at most so many, each the highest of its neighbours. */
  function sample() {
    let first = 0, last = count;
    if (state.range) {
      first = 0;
      while (first < count && place(first) < state.range[0]) first += 1;
      last = first;
      while (last < count && place(last) <= state.range[1]) last += 1;
      first = Math.max(0, first - 1);
      last = Math.min(count, last + 1);
    }
    const bucket = Math.max(1, Math.ceil((last - first) / SHOWN)), chosen = [];
    for (let start = first; start < last; start += bucket) {
      let highest = start;
      for (let i = start; i < Math.min(last, start + bucket); i += 1) if (points.allocated[i] > points.allocated[highest]) highest = i;
      chosen.push(highest);
    }
    return chosen;
  }

  function describe(i) {
    const at = points.label[i], lines = [`<b>${format(points.allocated[i], "bytes")}</b> allocated${points.reserved[i] === null ? "" : `, ${format(points.reserved[i], "bytes")} reserved`}`];
    lines.push(`${escapeLabel(phase(i))}: ${escapeLabel(label(i))}`);
    if (data.operators[at]) lines.push(`operator ${escapeLabel(data.operators[at])}`);
    if (data.modules[at]) lines.push(`module ${escapeLabel(data.modules[at])}`);
    if (data.sources[at]) lines.push(escapeLabel(shortPath(data.sources[at])));
    const shares = categories.map((name, c) => [stacks[c][i], name]).filter(([bytes]) => bytes > 0).sort((a, b) => b[0] - a[0]);
    return [...lines, ...shares.slice(0, 6).map(([bytes, name]) => `${escapeLabel(name)} ${format(bytes, "bytes")}`)].join("<br>");
  }

  function traces() {
    const chosen = sample(), x = [...chosen.map(place), place(Math.min(count, chosen[chosen.length - 1] + 1))];
    const ending = (values) => [...values, values[values.length - 1]];
    const made = categories.map((name, c) => ({
      type: "scatter", mode: "lines", stackgroup: "held", name, x, y: ending(chosen.map((i) => stacks[c][i])), line: { shape: "hv", width: 0 },
      fillcolor: theme.color(name), hoverinfo: "skip" }));
    if (!categories.length) made.push({ type: "scatter", mode: "lines", name: "allocated", x, y: ending(chosen.map((i) => points.allocated[i])), line: { shape: "hv", width: 1 }, fill: "tozeroy", hoverinfo: "skip" });
    if (points.reserved.some((r) => r !== null)) {
      made.push({ type: "scatter", mode: "lines", name: "reserved", x, y: ending(chosen.map((i) => points.reserved[i])), line: { shape: "hv", width: 1.5, dash: "dot", color: theme.color("soft") }, hoverinfo: "skip" });
    }
    made.push({ type: "scatter", mode: "lines", name: "allocated", showlegend: false, x: chosen.map(place), y: chosen.map((i) => points.allocated[i]), customdata: chosen,
      text: chosen.map(describe), hovertemplate: "%{text}<extra></extra>", line: { shape: "hv", width: 1.2, color: theme.color("ink") } });
    return made;
  }

  function marks() {
    const shapes = [], annotations = [];
    const whole = state.range ? state.range[1] - state.range[0] : place(count - 1) - place(0);
    let labelled = -Infinity, raised = 0;  // labels of short phases stand above one another
    for (let i = 0; i < count; i += 1) {
      if (i === 0 || points.phase[i] !== points.phase[i - 1]) {
        if (i) shapes.push({ type: "line", x0: place(i), x1: place(i), yref: "paper", y0: 0, y1: 1.04, line: { color: theme.color("soft"), width: 1 } });
        raised = place(i) - labelled < whole * 0.09 ? raised + 1 : 0;
        labelled = place(i);
        annotations.push({ x: place(i), yref: "paper", y: 1.01 + 0.05 * raised, xanchor: whole && (place(i) - place(0)) / whole > 0.9 ? "right" : "left", yanchor: "bottom", text: escapeLabel(phase(i)), showarrow: false, font: { color: theme.color("soft"), size: 12 } });
      }
    }
    const at = place(state.moment);
    shapes.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: theme.color("mark"), width: 2 } });
    annotations.push({ x: place(peak), y: points.allocated[peak], text: `peak ${format(points.allocated[peak], "bytes")}`, showarrow: true, arrowhead: 2, ax: 0, ay: -26, font: { color: theme.color("ink") } });
    return { shapes, annotations };
  }

  const chart = element("div", { class: "chart", tabindex: 0, role: "img", style: "height:27rem",
    "aria-label": `Memory over the step. Peak ${format(points.allocated[peak], "bytes")} in ${phase(peak)} at ${label(peak)}. Left and right arrow keys choose a moment.` });
  const panel = element("div", { class: "panel", "aria-live": "polite" });

  function draw() {
    const marked = marks();
    Plotly.react(chart, traces(), theme.layout({
      hovermode: "x", legend: { orientation: "h", y: -0.16, yanchor: "top", traceorder: "normal" }, margin: { l: 70, r: 16, t: 64, b: 40 }, ...marked,
      xaxis: { title: { text: state.byTime ? "time of the host's call" : "operator calls, in order", standoff: 4 }, range: state.range ?? [place(0), place(count)], tickformat: state.byTime ? "~s" : undefined, ticksuffix: state.byTime ? "s" : "" },
      yaxis: { ...byteTicks(Math.max(...points.allocated, ...points.reserved.map((r) => r ?? 0))), rangemode: "tozero" } }), chartOptions);
  }

  function choose(moment) {
    state.moment = Math.max(0, Math.min(count - 1, moment));
    Plotly.relayout(chart, marks());
    listHolders();
  }

  /* Who holds memory at the moment, largest first. */
  function listHolders() {
    const held = new Map(), m = state.moment;
    for (let i = 0; i < blocks.holder.length; i += 1) {
      if (blocks.born[i] > m || blocks.freed[i] <= m) continue;
      const holder = blocks.holder[i], category = categories[holders.category[holder]];
      const name = state.grouping === "holder" ? holders.label[holder] : state.grouping === "module" ? holders.module[holder] || "(no module)" : category;
      const key = `${name}\u0000${state.grouping === "category" ? "" : category}`;
      const entry = held.get(key) ?? { name, category, module: state.grouping === "holder" ? holders.module[holder] : "", bytes: 0, blocks: 0 };
      entry.bytes += blocks.bytes[i];
      entry.blocks += 1;
      held.set(key, entry);
    }
    const rows = [...held.values()].sort((a, b) => b.bytes - a.bytes), most = rows.length ? rows[0].bytes : 1, shown = rows.slice(0, 60);
    const rest = rows.slice(60).reduce((sum, row) => sum + row.bytes, 0), at = points.label[m];
    const where = [data.operators[at], data.modules[at] && `module ${data.modules[at]}`].filter(Boolean), source = data.sources[at];
    panel.replaceChildren(
      element("h3", {}, `${format(points.allocated[m], "bytes")} held${m === peak ? " at the peak" : ""}`),
      element("p", {}, `${phase(m)}, ${label(m)}${points.seconds[m] === null ? "" : points.seconds[m] < 0 ? ", in the step before the timed one" : `, ${format(points.seconds[m], "seconds")} into the step`}`),
      ...where.map((line) => element("p", {}, line)),
      ...(source ? [element("p", { title: source }, shortPath(source))] : []),
      element("ul", { class: "holders" }, ...shown.map((row) => {
        const item = element("li", { title: `${row.bytes.toLocaleString("en")} bytes in ${row.blocks.toLocaleString("en")} blocks` },
          element("span", {}, `${row.name} `, element("small", {}, [row.category !== row.name ? row.category : "", row.module !== row.name ? row.module : ""].filter(Boolean).join(" · "))),
          element("span", { class: "size" }, format(row.bytes, "bytes")));
        item.style.setProperty("--share", `${100 * row.bytes / most}%`);
        item.style.setProperty("--color", theme.color(row.category));
        return item;
      })),
      ...(rest ? [element("p", {}, `${rows.length - 60} more: ${format(rest, "bytes")}`)] : []));
  }

  const toPeak = element("button", { type: "button", onclick: () => choose(peak) }, "Go to the peak");
  const controls = element("div", { class: "controls" }, toPeak,
    selectBox("Holders by", [["holder", "node or parameter"], ["module", "module"], ["category", "category"]], "holder", (chosen) => { state.grouping = chosen; listHolders(); }),
    ...(hasTime ? [selectBox("Over", [["order", "operator calls"], ["time", "time"]], "order", (chosen) => { state.byTime = chosen === "time"; state.range = null; draw(); })] : []),
    element("span", { class: "note" }, data.thinned ? `Of ${(data.thinned + count).toLocaleString("en")} moments the highest of each few are kept.` : ""));
  box.append(controls, element("div", { class: "split" }, chart, panel));
  draw();
  listHolders();
  theme.follow(() => { draw(); listHolders(); });
  chart.on("plotly_click", (event) => { const hit = event.points.find((p) => p.customdata !== undefined); if (hit) choose(hit.customdata); });
  chart.on("plotly_relayout", (change) => {
    if (change["xaxis.range[0]"] !== undefined) state.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else if (change["xaxis.autorange"]) state.range = null;
    else return;
    draw();
  });
  chart.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageUp: 50, PageDown: -50 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    choose(state.moment + steps[event.key]);
  });
};
