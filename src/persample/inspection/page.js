"use strict";
const value = (body, column) => {
  const cell = body.rows[0].cells[column];
  const text = cell.dataset.value ?? cell.textContent;
  const number = Number(text);
  return text.trim() === "" || Number.isNaN(number) ? text : number;
};
const order = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
for (const table of document.querySelectorAll("table.sortable")) {
  for (const button of table.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const column = Number(button.dataset.column);
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const bodies = [...table.tBodies].sort((a, b) => order(value(a, column), value(b, column)));
      if (down) bodies.reverse();
      table.append(...bodies);
    });
  }
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tbody > tr:first-child");
    const button = row?.querySelector(".open");
    if (button && !event.target.closest("a")) toggle(button);
  });
  table.addEventListener("keydown", (event) => {
    const buttons = [...table.querySelectorAll(".open")];
    const at = buttons.indexOf(document.activeElement);
    if (at < 0) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      buttons[at + (event.key === "ArrowDown" ? 1 : -1)]?.focus();
      event.preventDefault();
    } else if (event.key === "Escape") {
      toggle(buttons[at], false);
    }
  });
}
function toggle(button, open = button.getAttribute("aria-expanded") !== "true") {
  button.setAttribute("aria-expanded", String(open));
  document.getElementById(button.getAttribute("aria-controls")).hidden = !open;
}
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
