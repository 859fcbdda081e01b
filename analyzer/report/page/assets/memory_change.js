"use strict";
/* Allocated memory over two steps, above each other: phase by phase, or over time. */
drawings.memory_change = (box, data) => {
  const { sides, phases } = data, state = { byTime: false };
  const hasTime = sides.every((side) => side.seconds.every((s) => s !== null) && side.seconds.at(-1) > side.seconds[0]);
  const chart = element("div", { class: "chart", role: "img", style: "height:26rem",
    "aria-label": `Allocated memory over both steps: ${sides.map((side) => `at most ${format(Math.max(...side.allocated), "bytes")} ${side.title}`).join(", ")}` });
  const describe = (side, i) => [`<b>${format(side.allocated[i], "bytes")}</b> ${side.title}`, `${escapeLabel(side.phase[i])}: ${escapeLabel(side.label[i])}`,
    ...(side.module[i] ? [`module ${escapeLabel(side.module[i])}`] : [])].join("<br>");

  function draw() {
    const colors = ["gradient", "mark"];
    const traces = sides.map((side, s) => ({ type: "scatter", mode: "lines", name: side.title, x: state.byTime ? side.seconds : side.x, y: side.allocated,
      hovertext: side.allocated.map((_, i) => describe(side, i)), hoverinfo: "text", line: { shape: "hv", width: 2, color: theme.color(colors[s]), dash: s ? "solid" : "dot" } }));
    const marks = state.byTime ? [] : phases;
    Plotly.react(chart, traces, theme.layout({
      hovermode: "x", legend: { orientation: "h", y: -0.12 }, yaxis: { rangemode: "tozero", ...byteTicks(Math.max(...sides.flatMap((side) => side.allocated))) },
      xaxis: state.byTime ? { ticksuffix: "s", tickformat: "~s" } : { showticklabels: false, title: { text: phases.length ? "phases, each as wide in both steps" : "the whole step" } },
      margin: { l: 60, r: 16, t: 48, b: 40 },
      shapes: marks.slice(1).map(({ start }) => ({ type: "line", x0: start, x1: start, yref: "paper", y0: 0, y1: 1.04, line: { color: theme.color("soft"), width: 1 } })),
      annotations: marks.filter(({ name }) => name).map(({ name, start }, i) => ({ x: start, yref: "paper", y: 1.01 + (start > 0.93 ? 0.05 * (i % 2) : 0), xanchor: start > 0.9 ? "right" : "left", yanchor: "bottom", text: escapeLabel(name), showarrow: false, font: { color: theme.color("soft"), size: 12 } })),
    }), chartOptions);
  }
  if (hasTime) box.append(element("div", { class: "controls" }, selectBox("Over", [["phases", "phases"], ["time", "time"]], "phases", (chosen) => { state.byTime = chosen === "time"; draw(); })));
  box.append(chart);
  draw();
  theme.follow(draw);
};
