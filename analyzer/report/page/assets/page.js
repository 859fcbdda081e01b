"use strict";
/* Draws each part into its section, the first screen at once and each other when it comes near the window. */
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const parts = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  function draw(part) {
    if (part.isDrawn || !(part.kind in drawings)) return;
    part.isDrawn = true;
    drawings[part.kind](document.querySelector(`#${part.id} .body`), part.data, part.id);
  }
  const byId = Object.fromEntries(parts.map((part) => [part.id, part]));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(byId[entry.target.id]);
  }, { rootMargin: "200px" });
  for (const part of parts) watcher.observe(document.getElementById(part.id));
  window.addEventListener("beforeprint", () => parts.filter((part) => !document.getElementById(part.id).hidden).forEach(draw));
})();
