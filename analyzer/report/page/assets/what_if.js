"use strict";
/* Settings of the command that made the profile: posted to the server of the page, which profiles again and answers
where the page of that is. */
drawings.what_if = (box, data) => {
  const READERS = { number: (input) => Number(input.value), switch: (input) => input.checked, choice: (input) => input.value || null };
  const told = element("p", { class: "note", role: "status" });
  let running = false, clock = null;

  function makeInput(field) {
    if (field.kind === "number") return element("input", { type: "number", min: 1, step: 1, required: true, name: field.name, value: field.value });
    if (field.kind === "switch") return element("input", { type: "checkbox", name: field.name, checked: field.value });
    return element("select", { name: field.name }, ...field.choices.map(([value, text]) =>
      element("option", { value, selected: value === (field.value ?? "") }, text)));
  }
  const inputs = data.fields.map(makeInput);
  const start = element("button", { type: "submit", class: "start" }, "Profile again");
  const stop = element("button", { type: "button", disabled: true, onclick: () => fetch(data.stop, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" }) }, "Stop");
  const form = element("form", { class: "controls", onsubmit: run }, ...data.fields.map((field, i) =>
    element("label", {}, `${field.title} `, inputs[i])), start, stop);

  function setRunning(isRunning) {
    running = isRunning;
    for (const input of [...inputs, start]) input.disabled = running;
    stop.disabled = !running;
    clearInterval(clock);
    if (!running) return;
    const began = Date.now(), tell = () => { told.textContent = `Profiling: ${Math.round((Date.now() - began) / 1000)} s`; };
    tell();
    clock = setInterval(tell, 1000);
  }

  async function run(event) {
    event.preventDefault();
    if (running) return;
    const wanted = Object.fromEntries(data.fields.map((field, i) => [field.name, READERS[field.kind](inputs[i])]));
    setRunning(true);
    let answer;
    try {
      answer = await (await fetch(data.run, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(wanted) })).json();
    } catch {
      answer = { error: "The server does not answer: was `analyzer view` ended?" };
    }
    setRunning(false);
    told.textContent = answer.error ?? answer.change;
    told.classList.toggle("failed", "error" in answer);
    if (answer.page) window.location.assign(answer.page);
  }
  box.append(form, told);
};
