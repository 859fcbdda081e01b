"use strict";
/* What kinds of ranks have allocated over their steps, as lines over each other. */
drawings.rank_memory = (box, data) => {
  const { curves } = data, state = { byTime: false };
  const hasTime = curves.every((c) => c.seconds.every((s) => s !== null) && c.seconds[c.seconds.length - 1] > c.seconds[0]);
  const peaks = curves.map((c) => Math.max(...c.allocated));
  const chart = element("div", { class: "chart", role: "img", style: "height:24rem", "aria-label": `Memory of ${curves.length} kinds of ranks over a step; the table of ranks has their peaks` });
  function draw() {
    const made = curves.map((c, n) => ({ type: "scatter", mode: "lines", name: escapeLabel(`${c.name}: ${format(peaks[n], "bytes")}`), x: state.byTime ? c.seconds : c.allocated.map((_, i) => i / c.allocated.length), y: c.allocated,
      line: { shape: "hv", width: 1.6, color: `hsl(${Math.round((210 + 330 * n / curves.length) % 360)} 60% 50%)` }, hovertemplate: "%{text}<extra></extra>",
      text: c.allocated.map((bytes, i) => `<b>${escapeLabel(c.name)}</b> ${format(bytes, "bytes")}<br>${escapeLabel(c.phases[c.phase[i]])}: ${escapeLabel(c.labels[c.label[i]])}`) }));
    Plotly.react(chart, made, theme.layout({ hovermode: "closest", showlegend: true, legend: { orientation: "h", y: -0.16, yanchor: "top" },
      xaxis: state.byTime ? { tickformat: "~s", ticksuffix: "s", title: { text: "time of the host's call", standoff: 4 } } : { tickformat: ".0%", range: [0, 1], title: { text: "operator calls of the rank, in order", standoff: 4 } },
      yaxis: { ...byteTicks(Math.max(...peaks)), rangemode: "tozero" } }), chartOptions);
  }
  if (hasTime) box.append(element("div", { class: "controls" }, selectBox("Over", [["order", "operator calls"], ["time", "time"]], "order", (chosen) => { state.byTime = chosen === "time"; draw(); })));
  box.append(chart);
  draw();
  theme.follow(draw);
};
