"use strict";
/* The modules that explain the change of a quantity: a bar for each difference, and a table that sorts. */
drawings.module_change = (box, data) => {
  const MOST = 25;
  if (!data.quantities.length) return;
  const state = { quantity: data.quantities[0] };
  const chart = element("div", { class: "chart", role: "img", "aria-label": "Differences by module; the table below has the same figures" });
  const place = element("div"), told = element("span", { class: "note", role: "status" });
  const signed = (value, unit) => `${value > 0 ? "+" : ""}${format(value, unit)}`;
  const titleOf = (i) => (state.quantity.modules[i] > 1 ? `${state.quantity.module[i]} (${state.quantity.modules[i]})` : state.quantity.module[i]);
  const shorten = (text) => (text.length > 48 ? `…${text.slice(-47)}` : text);

  function draw() {
    const q = state.quantity;
    const known = q.difference.flatMap((d, i) => (d === null ? [] : [i])).sort((a, b) => Math.abs(q.difference[b]) - Math.abs(q.difference[a]));
    const rows = known.slice(0, MOST);
    chart.style.height = `${6 + 1.5 * rows.length}rem`;
    told.textContent = known.length > MOST ? `the ${MOST} largest of ${known.length} differences` : "";
    const most = Math.max(...rows.map((i) => Math.abs(q.difference[i])), 0);
    const ticks = q.unit === "bytes" ? byteTicks(most, true) : { tickformat: "~s", ticksuffix: q.unit === "seconds" ? "s" : "" };
    Plotly.react(chart, [{ type: "bar", orientation: "h", x: rows.map((i) => q.difference[i]), y: rows.map((_, place) => place),
      text: rows.map((i) => `<b>${escapeLabel(titleOf(i))}</b> ${escapeLabel(q.type[i])}<br>${format(q.before[i], q.unit)} before, ${format(q.after[i], q.unit)} after<br>${signed(q.difference[i], q.unit)}`),
      hovertemplate: "%{text}<extra></extra>", textposition: "none", marker: { color: rows.map((i) => theme.color(q.difference[i] > 0 ? "temporary" : "activation")) } }],
    theme.layout({ xaxis: ticks, yaxis: { autorange: "reversed", tickvals: rows.map((_, place) => place), ticktext: rows.map((i) => escapeLabel(shorten(titleOf(i)))) } }), chartOptions);
  }
  function list() {
    const q = state.quantity;
    place.replaceChildren(grid([{ title: "Module", unit: "text", values: q.module }, { title: "Class", unit: "text", values: q.type }, { title: "Modules", unit: "number", values: q.modules },
      { title: "Before", unit: q.unit, values: q.before }, { title: "After", unit: q.unit, values: q.after }, { title: "Change", unit: q.unit, values: q.difference },
      { title: "Change, %", unit: "number", values: q.percent }], { label: `changes of ${q.title}` }).element);
  }
  box.append(element("div", { class: "controls" }, selectBox("Quantity", data.quantities.map((q, i) => [String(i), q.title]), "0", (chosen) => { state.quantity = data.quantities[Number(chosen)]; draw(); list(); }), told), chart, place);
  draw();
  list();
  theme.follow(draw);
};
