"use strict";
/* Which group of parts is in sight. */
drawings.choice = (box, data) => {
  const select = selectBox("Show", data.groups.map((group) => [group, group]), data.groups[0], (chosen) => {
    for (const part of document.querySelectorAll("[data-group]")) part.hidden = part.dataset.group !== chosen;
  });
  box.append(element("div", { class: "controls" }, select, element("span", { class: "note" }, data.note)));
};
