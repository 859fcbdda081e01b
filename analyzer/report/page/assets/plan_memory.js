"use strict";
/* Memory of a step without and with a plan, over each other: forward passes and backward passes are as wide, since a
plan adds calls to the backward pass. */
drawings.plan_memory = (box, data) => {
  const state = { whole: data.budget_of === "step" };
  const curves = [["without the plan", data.without, "soft"], ["with the plan", data.with, "activation"]].filter(([, curve]) => curve);
  const bytes = (curve, i) => curve.activations[i] + (state.whole ? curve.others[i] + data.held : 0);
  const place = (curve, i) => (i < curve.forward ? i / curve.forward : 1 + (i - curve.forward) / (curve.activations.length - curve.forward));
  const peak = (curve) => curve.activations.reduce((most, _, i) => Math.max(most, bytes(curve, i)), 0);
  const chart = element("div", { class: "chart", role: "img", style: "height:26rem", "aria-label": "Memory over the step without and with the plan, and the budget; the figures above say the peaks" });
  function draw() {
    const hasBudget = state.whole === (data.budget_of === "step"), lines = [];
    if (hasBudget) lines.push([data.budget, `budget ${format(data.budget, "bytes")}`, "bad"]);
    if (state.whole && data.update) lines.push([data.update, `the optimizer's update ${format(data.update, "bytes")}`, "optimizer state"]);
    const made = curves.map(([name, curve, color]) => ({ type: "scatter", mode: "lines", name: `${name}: ${format(peak(curve), "bytes")}`, x: curve.node.map((_, i) => place(curve, i)), y: curve.node.map((_, i) => bytes(curve, i)),
      line: { shape: "hv", width: 1.6, color: theme.color(color) }, fill: "tozeroy", hovertemplate: "%{text}<extra></extra>",
      text: curve.node.map((node, i) => `<b>${format(bytes(curve, i), "bytes")}</b> ${name}<br>${i < curve.forward ? "forward" : "backward"}: ${escapeLabel(curve.names[node])}`) }));
    const top = Math.max(...curves.map(([, curve]) => peak(curve)), ...lines.map(([at]) => at));
    Plotly.react(chart, made, theme.layout({ hovermode: "closest", showlegend: true, legend: { orientation: "h", y: -0.12, yanchor: "top" }, margin: { l: 70, r: 16, t: 24, b: 40 },
      shapes: [...lines.map(([at, , color]) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: at, y1: at, line: { color: theme.color(color), dash: "dash", width: 1.5 } })),
        { type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: theme.color("soft"), width: 1 } }],
      annotations: [...lines.map(([at, text, color]) => ({ xref: "paper", x: 1, xanchor: "right", y: at, yanchor: "bottom", showarrow: false, text, font: { color: theme.color(color) } })),
        ...["forward", "backward"].map((text, x) => ({ x, yref: "paper", y: 1, xanchor: "left", yanchor: "bottom", showarrow: false, text, font: { color: theme.color("soft") } }))],
      xaxis: { range: [0, 2], showticklabels: false }, yaxis: { ...byteTicks(top), range: [0, top * 1.08] } }), chartOptions);
  }
  box.append(element("div", { class: "controls" }, selectBox("Of", [["activations", "activations"], ["whole", "the whole step"]], state.whole ? "whole" : "activations", (chosen) => { state.whole = chosen === "whole"; draw(); })), chart);
  draw();
  theme.follow(draw);
};
