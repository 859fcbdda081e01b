"use strict";
/* The configurations of a sweep: a scatter of two quantities, the front of those that no other one beats in both, and a
table of all. */
drawings.sweep = (box, data) => {
  const { quantities, dimensions, fits } = data, count = fits.length, SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down"];
  const quantity = (title) => quantities.find((q) => q.title === title);
  const groups = [...dimensions, ...(new Set(fits).size > 1 ? [{ title: "fits", values: fits, order: ["yes", "no", "unknown"].filter((f) => fits.includes(f)) }] : [])];
  const state = { x: quantity(data.x), y: quantity(data.y), color: groups[0], shape: groups.find((g) => g.title === "fits") ?? groups[1], front: [], isLog: false };
  const say = (row) => dimensions.map((d) => `${d.title} ${d.values[row]}`).join(", ") || "the configuration";

  /* Rows that fit and that no other such row beats in both quantities, in the order of x. */
  function findFront() {
    const cost = (q, row) => (q.more ? -q.values[row] : q.values[row]);
    const rows = [...Array(count).keys()].filter((row) => fits[row] !== "no" && state.x.values[row] !== null && state.y.values[row] !== null);
    rows.sort((a, b) => cost(state.x, a) - cost(state.x, b) || cost(state.y, a) - cost(state.y, b));
    let best = Infinity;
    return rows.filter((row) => cost(state.y, row) < best && (best = cost(state.y, row), true));
  }

  function axis(q, isLog) {
    const values = q.values.filter((v) => v !== null), top = Math.max(0, ...values);
    return { title: { text: `${q.title}, ${q.more ? "more" : "less"} is better`, standoff: 6 }, ...(isLog && q.unit !== "bytes" ? { type: "log" } : { rangemode: "tozero" }),
      ...(q.unit === "bytes" && Math.min(...values) >= 0 ? byteTicks(top) : { tickformat: q.unit === "share" ? ".0%" : "~s", ticksuffix: q.unit === "seconds" ? "s" : "" }) };
  }

  function traces() {
    state.front = findFront();
    const { x, y } = state, rows = [...Array(count).keys()].filter((row) => x.values[row] !== null && y.values[row] !== null), made = [];
    made.push({ type: "scatter", mode: "lines", name: `front: ${state.front.length} of ${rows.length}`, x: state.front.map((row) => x.values[row]), y: state.front.map((row) => y.values[row]), line: { color: theme.color("mark"), width: 2, dash: "dot" }, hoverinfo: "skip" });
    const shapes = state.shape ? state.shape.order : [""], colors = state.color ? state.color.order : [""];
    colors.forEach((color, c) => shapes.forEach((shape, s) => {
      const mine = rows.filter((row) => (!state.color || state.color.values[row] === color) && (!state.shape || state.shape.values[row] === shape));
      if (!mine.length) return;
      const name = [state.color && `${state.color.title} ${color}`, state.shape && state.shape !== state.color && `${state.shape.title} ${shape}`].filter(Boolean).join(", ") || "configurations";
      made.push({ type: "scatter", mode: "markers", name: escapeLabel(name), x: mine.map((row) => x.values[row]), y: mine.map((row) => y.values[row]), customdata: mine,
        text: mine.map((row) => [`<b>${escapeLabel(say(row))}</b>`, ...[x, y].map((q) => `${q.title} ${format(q.values[row], q.unit)}`), fits[row] === "no" ? "does not fit" : "", state.front.includes(row) ? "on the front" : ""].filter(Boolean).join("<br>")),
        hovertemplate: "%{text}<extra></extra>",
        marker: { size: 11, symbol: mine.map((row) => `${SYMBOLS[s % SYMBOLS.length]}${fits[row] === "no" ? "-open" : ""}`), color: `hsl(${Math.round((210 + 330 * c / colors.length) % 360)} 55% 50%)`, line: { width: mine.map((row) => (state.front.includes(row) ? 2.5 : 1)), color: mine.map((row) => (state.front.includes(row) ? theme.color("ink") : theme.color("paper"))) } } });
    }));
    return made;
  }

  const chart = element("div", { class: "chart", role: "img", style: "height:30rem", "aria-label": "Configurations by two quantities; the table below has the same figures" });
  const onFront = element("ol", { class: "note", "aria-live": "polite" });
  function draw() {
    Plotly.react(chart, traces(), theme.layout({ hovermode: "closest", showlegend: true, legend: { orientation: "h", y: -0.16, yanchor: "top" }, margin: { l: 70, r: 16, t: 16, b: 50 }, xaxis: axis(state.x), yaxis: axis(state.y, state.isLog) }), chartOptions);
    onFront.replaceChildren(...state.front.slice(0, 40).map((row) => element("li", {}, element("button", { type: "button", onclick: () => table.select(row) }, say(row)),
      ` ${format(state.x.values[row], state.x.unit)}, ${format(state.y.values[row], state.y.unit)}`)));
  }

  const table = grid([...dimensions.map((d) => ({ title: d.title, unit: "text", values: d.values })), { title: "Fits", unit: "text", values: fits }, ...quantities], { label: "configurations" });
  const titles = quantities.map((q) => [q.title, q.title]), named = [["", "nothing"], ...groups.map((g) => [g.title, g.title])];
  const pick = (key, found) => (chosen) => { state[key] = found(chosen); draw(); };
  box.append(element("div", { class: "controls" }, selectBox("Across", titles, data.x, pick("x", quantity)), selectBox("Up", titles, data.y, pick("y", quantity)),
    selectBox("Scale", [["linear", "linear"], ["log", "logarithmic"]], "linear", (chosen) => { state.isLog = chosen === "log"; draw(); }),
    ...(groups.length ? [["Colour by", "color"], ["Shape by", "shape"]].map(([text, key]) => selectBox(text, named, state[key]?.title ?? "", pick(key, (chosen) => groups.find((g) => g.title === chosen)))) : [])), chart,
    element("h3", {}, "On the front"), element("p", { class: "note" }, "Of the configurations that fit, those that no other one beats in both quantities. Hollow marks do not fit."), onFront, element("h3", {}, "All"), table.element);
  draw();
  theme.follow(draw);
  chart.on("plotly_click", (event) => { const row = event.points[0].customdata; if (row !== undefined) table.select(row); });
};
