"use strict";
/* What ranks communicate: totals by kind, group and phase, and each call. */
drawings.communication = (box, data) => {
  const UNITS = { bytes: ["Bytes", "bytes"], wire_bytes: ["On the wire", "bytes"], seconds: ["Time", "seconds"], exposed_seconds: ["Exposed", "seconds"],
    start_seconds: ["Begins", "seconds"], kind: ["Kind", "text"], group: ["Group", "text"], phase: ["Phase", "text"], module_path: ["Module", "text"],
    node: ["Node", "text"], ranks: ["Ranks", "number"], calls: ["Calls", "number"] };
  const columns = (table) => Object.entries(table).map(([name, values]) => ({ title: UNITS[name][0], unit: UNITS[name][1], values }));
  const chart = element("div", { class: "chart", role: "img", style: "height:16rem", "aria-label": "Time of communication by kind and group; the table below has the same figures" });
  const t = data.totals, keys = t.kind.map((kind, i) => `${kind ?? "unknown"}, ${t.group[i] ?? ""} ${t.phase[i] ?? ""}`);
  function draw() {
    const hidden = t.seconds.map((s, i) => (s === null || t.exposed_seconds[i] === null ? null : s - t.exposed_seconds[i]));
    Plotly.react(chart, [
      { type: "bar", orientation: "h", name: "exposed", y: keys.map(escapeLabel), x: t.exposed_seconds, text: t.exposed_seconds.map((s) => format(s, "seconds")), hoverinfo: "y+text+name", textposition: "none", marker: { color: theme.color("temporary") } },
      { type: "bar", orientation: "h", name: "behind kernels", y: keys.map(escapeLabel), x: hidden, text: hidden.map((s) => format(s, "seconds")), hoverinfo: "y+text+name", textposition: "none", marker: { color: theme.color("communication") } },
    ], theme.layout({ barmode: "stack", legend: { orientation: "h" }, xaxis: { ticksuffix: "s", tickformat: "~s" }, yaxis: { autorange: "reversed" } }), chartOptions);
  }
  if (t.seconds.some((s) => s !== null)) {
    box.append(chart);
    draw();
    theme.follow(draw);
  }
  box.append(grid(columns(data.totals), { label: "communication by kind" }).element, element("h3", {}, "Each call"), grid(columns(data.calls), { label: "calls" }).element);
};
