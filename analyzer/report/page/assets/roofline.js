"use strict";
/* Operators and modules under the roof of the device. */
drawings.roofline = (box, data) => {
  const chart = element("div", { class: "chart", role: "img", style: "height:28rem",
    "aria-label": `Roofline of ${data.device}; the figures are in the tables of operators and modules` });
  const total = data.seconds.reduce((sum, s, i) => (data.kind[i] === "operator" ? sum + (s ?? 0) : sum), 0);
  const groups = [["forward", "mark"], ["backward", "temporary"], ["recompute", "gradient"], ["optimizer", "optimizer state"], ["step", "activation"]];
  function draw() {
    const low = Math.min(...data.intensity) / 3, high = Math.max(...data.intensity, data.peaks[0].rate / data.bandwidth) * 3;
    const roofs = data.peaks.map((peak) => ({ type: "scatter", mode: "lines", x: [low, peak.rate / data.bandwidth, high], y: [low * data.bandwidth, peak.rate, peak.rate],
      name: `${escapeLabel(peak.name)} ${format(peak.rate, "rate")}`, hoverinfo: "name", line: { width: 1.5 } }));
    const made = groups.flatMap(([part, color]) => {
      const rows = data.part.flatMap((p, i) => (p === part ? [i] : []));
      if (!rows.length) return [];
      return [{ type: "scatter", mode: "markers", name: part === "step" ? "modules" : `operators, ${part}`, visible: part === "step" ? "legendonly" : true, x: rows.map((i) => data.intensity[i]), y: rows.map((i) => data.flops_per_second[i]),
        text: rows.map((i) => [`<b>${escapeLabel(data.name[i] || "(model)")}</b> ${escapeLabel(data.type[i])}`, `${format(data.flops_per_second[i], "rate")} at ${data.intensity[i].toPrecision(3)} FLOPs a byte`,
          `${format(data.seconds[i], "seconds")}${total ? `, ${format(data.seconds[i] / total, "share")} of the operators' time` : ""}`, `below the ${data.bound[i] ?? "unknown"} roof`].join("<br>")),
        hovertemplate: "%{text}<extra></extra>",
        marker: { color: theme.color(color), opacity: 0.75, size: rows.map((i) => 5 + 35 * Math.sqrt(total ? Math.min(1, data.seconds[i] / total) : 0)), line: { width: 1, color: theme.color("paper") } } }];
    });
    Plotly.react(chart, [...roofs, ...made], theme.layout({ legend: { orientation: "h", y: -0.18 }, hovermode: "closest",
      xaxis: { type: "log", title: { text: "FLOPs to a byte" } }, yaxis: { type: "log", title: { text: "FLOP/s" }, exponentformat: "SI" } }), chartOptions);
  }
  box.append(chart, element("p", { class: "note" }, `The area of a circle is its share of the time.${data.left_out ? ` ${data.left_out} that do no arithmetic, or whose time is not known, are not drawn.` : ""}`));
  draw();
  theme.follow(draw);
};
