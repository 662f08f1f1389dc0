"use strict";
document.documentElement.classList.add("has-script");

const valueOf = (row, column) => {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
};
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));

for (const table of document.querySelectorAll("table.rows")) {
  [...table.tHead.rows[0].cells].forEach((cell, column, cells) => {
    cell.addEventListener("click", () => {
      const wasDown = cell.getAttribute("aria-sort") === "descending";
      cells.forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", wasDown ? "ascending" : "descending");
      const sign = wasDown ? 1 : -1;
      const body = table.tBodies[0];
      const order = (a, b) => sign * compare(valueOf(a, column), valueOf(b, column));
      body.append(...[...body.rows].sort(order));
    });
  });
}
