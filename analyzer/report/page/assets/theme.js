"use strict";
/* Light or dark: as the system has it, or as the button says. Charts follow. */
const theme = (() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const choices = ["auto", "light", "dark"];
  const charts = [];
  let chosen = 0;

  const isDark = () => choices[chosen] === "dark" || (choices[chosen] === "auto" && dark.matches);
  function apply() {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light";
    document.getElementById("theme").textContent = `Theme: ${choices[chosen]}`;
    charts.forEach((draw) => draw());
  }
  function color(name) {
    const style = getComputedStyle(document.documentElement);
    const found = style.getPropertyValue(`--${name.replace(/ /g, "-")}`).trim();
    return found || style.getPropertyValue("--other").trim();
  }
  function layout(more = {}) {
    const axis = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("ink"), size: 12, family: "system-ui, sans-serif" },
      margin: { l: 60, r: 16, t: 16, b: 40 }, hoverlabel: { align: "left", bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink") } },
      ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
    };
  }
  document.getElementById("theme").addEventListener("click", () => { chosen = (chosen + 1) % choices.length; apply(); });
  dark.addEventListener("change", apply);
  apply();
  /* Charts are drawn again in the other colours. */
  return { color, layout, follow: (draw) => charts.push(draw) };
})();
const chartOptions = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };

/* Ticks of an axis of bytes up to that many, at round sizes; also of what is less than nothing, for differences. */
function byteTicks(top, isSigned = false) {
  const power = Math.floor(Math.log2(top || 1) / 10), unit = 1024 ** power;
  const step = [1, 2, 5, 10, 20, 50, 100, 200].find((size) => top / unit / size <= 6) * unit;
  const values = [];
  for (let value = isSigned ? -Math.ceil(top / step) * step : 0; value <= top * 1.05; value += step) values.push(value);
  return { tickvals: values, ticktext: values.map((value) => (value ? `${value / unit} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}` : "0")) };
}
