"use strict";
/* What budgets cost: the peak that a plan for each reaches, and what runs again. */
drawings.frontier = (box, data) => {
  const unit = data.unit === "seconds" ? "seconds" : "count", what = data.unit === "seconds" ? "of the step's time" : "of the forward pass's FLOPs";
  const share = (overhead) => (overhead === null || !data.whole ? null : overhead / data.whole), useShare = Boolean(data.whole), up = (overhead) => (useShare ? share(overhead) : overhead);
  const chart = element("div", { class: "chart", role: "img", style: "height:22rem", "aria-label": "Overhead against peak memory of plans; the table below has the same figures" });
  const tell = (peak, overhead, more) => [`<b>peak ${format(peak, "bytes")}</b>`, `${format(overhead, unit)} run again${useShare ? `, ${format(share(overhead), "share")} ${what}` : ""}`, more].join("<br>");
  function draw() {
    const known = data.peak.flatMap((_, i) => (data.overhead[i] === null ? [] : [i])).sort((a, b) => data.peak[a] - data.peak[b]), { own } = data, made = [
      { type: "scatter", mode: "lines+markers", name: "plans", x: known.map((i) => data.peak[i]), y: known.map((i) => up(data.overhead[i])), line: { shape: "hv", color: theme.color("mark") }, marker: { size: 9 },
        text: known.map((i) => tell(data.peak[i], data.overhead[i], `budget ${format(data.budget[i], "bytes")}`)), hovertemplate: "%{text}<extra></extra>" }];
    if (own.peak !== null && own.overhead !== null) made.push({ type: "scatter", mode: "markers", name: "this plan", x: [own.peak], y: [up(own.overhead)], marker: { size: 16, symbol: "star", color: theme.color("temporary") }, text: [tell(own.peak, own.overhead, "this plan")], hovertemplate: "%{text}<extra></extra>" });
    Plotly.react(chart, made, theme.layout({ hovermode: "closest", showlegend: true, legend: { orientation: "h", y: -0.2, yanchor: "top" }, margin: { l: 70, r: 16, t: 16, b: 50 },
      xaxis: { ...byteTicks(Math.max(...data.peak, own.peak ?? 0)), rangemode: "tozero", title: { text: "peak memory", standoff: 6 } },
      yaxis: { rangemode: "tozero", title: { text: useShare ? `run again, ${what}` : "overhead" }, tickformat: useShare ? ".1%" : "~s" } }), chartOptions);
  }
  box.append(chart, grid([{ title: "Budget", unit: "bytes", values: data.budget }, { title: "Peak reached", unit: "bytes", values: data.peak }, { title: "Overhead", unit, values: data.overhead },
    { title: "Share", unit: "share", values: data.overhead.map(share) }], { label: "budgets" }).element);
  draw();
  theme.follow(draw);
};
