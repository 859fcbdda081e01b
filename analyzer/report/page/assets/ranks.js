"use strict";
/* Kinds of ranks: bars of one quantity, the peak by category, and a table of all. */
drawings.ranks = (box, data) => {
  const count = data.kind.length, names = data.kind.map((kind, i) => `${data.ranks[i]}: ${kind}`), label = (text) => escapeLabel(text.length > 40 ? `${text.slice(0, 39)}…` : text);
  const state = { quantity: data.quantities[0] };
  const chart = element("div", { class: "chart", role: "img", style: `height:${6 + 1.9 * count}rem`, "aria-label": "Kinds of ranks by one quantity; the table below has the same figures" });

  function traces() {
    const { title, unit, values } = state.quantity, base = { type: "bar", orientation: "h", y: names.map(label), hovertemplate: "%{hovertext}<extra></extra>" };
    if (title === "Peak allocated" && Object.keys(data.categories).length) {
      return Object.entries(data.categories).map(([name, bytes]) => ({ ...base, name, x: bytes, marker: { color: theme.color(name) },
        hovertext: bytes.map((n, i) => `${label(names[i])}<br>${escapeLabel(name)} <b>${format(n, "bytes")}</b> of ${format(values[i], "bytes")}`) }));
    }
    return [{ ...base, x: values, showlegend: false, marker: { color: theme.color("parameter") }, text: values.map((v) => format(v, unit)), textposition: "auto",
      hovertext: values.map((v, i) => `${label(names[i])}<br>${title} <b>${format(v, unit)}</b>`) }];
  }

  function draw() {
    const { title, unit, values } = state.quantity, most = Math.max(...values.map((v) => v ?? 0));
    const isNear = data.capacity !== null && title.startsWith("Peak") && most > data.capacity / 8;
    const line = isNear ? { shapes: [{ type: "line", x0: data.capacity, x1: data.capacity, yref: "paper", y0: 0, y1: 1, line: { color: theme.color("bad"), dash: "dash" } }],
      annotations: [{ x: data.capacity, yref: "paper", y: 1.02, yanchor: "bottom", xanchor: "right", showarrow: false, text: `${escapeLabel(data.device)} has ${format(data.capacity, "bytes")}`, font: { color: theme.color("bad") } }] } : {};
    Plotly.react(chart, traces(), theme.layout({ barmode: "stack", ...line, margin: { l: 60, r: 16, t: 24, b: 40 }, legend: { orientation: "h", traceorder: "normal", y: -2.2 / (1.9 * count + 1), yanchor: "top" },
      xaxis: unit === "bytes" ? byteTicks(isNear ? Math.max(most, data.capacity) : most) : { tickformat: "~s", ticksuffix: unit === "seconds" ? "s" : "" }, yaxis: { autorange: "reversed" } }), chartOptions);
  }

  const who = [data.deciding === null ? null : `Memory is decided by ${names[data.deciding]}.`, data.slowest === null ? null : `Time is decided by ${names[data.slowest]}.`].filter(Boolean);
  const decides = data.kind.map((_, i) => [i === data.deciding && "memory", i === data.slowest && "time"].filter(Boolean).join(", "));
  const table = grid([{ title: "Ranks", unit: "text", values: data.ranks }, { title: "Kind", unit: "text", values: data.kind }, { title: "Alike", unit: "number", values: data.alike },
    { title: "Decides", unit: "text", values: decides }, ...data.quantities, { title: "Peak in", unit: "text", values: data.peak_phase.map((phase) => phase ?? "-") }], { label: "kinds of ranks" });
  if (state.quantity) {
    box.append(element("div", { class: "controls" }, selectBox("By", data.quantities.map((q) => [q.title, q.title]), state.quantity.title, (chosen) => { state.quantity = data.quantities.find((q) => q.title === chosen); draw(); })), chart);
    draw();
    theme.follow(draw);
  }
  box.append(element("p", { class: "note" }, who.join(" ")), table.element);
};
