"use strict";
// Sorts and filters the tables. Without it the page shows everything in the order of the report.
(() => {
  // Shows the items that hold all words, and says how many of how many that are.
  const filter = (input, items, what) => {
    const status = input.parentElement.querySelector(".rows");
    const texts = new Map(items.map((item) => [item, item.textContent.toLowerCase()]));
    const apply = () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const item of items) item.hidden = !wanted.every((word) => texts.get(item).includes(word));
      const shown = items.filter((item) => !item.hidden).length;
      status.textContent = `${shown === items.length ? "" : `${shown} of `}${items.length} ${what}`;
    };
    input.addEventListener("input", apply);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { input.value = ""; apply(); }
    });
  };

  // A number is sorted by its full value, a text by letters and the numbers in it.
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const compare = (a, b) => (typeof a === "number" ? a - b : order.compare(a, b));
  const keyOf = (cell) => {
    const value = cell.dataset.v ?? cell.textContent.trim();
    if (value === "" || value === "-") return null;
    return cell.dataset.v === undefined ? value : Number(value);
  };
  const sort = (table, heading) => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row.cells[heading.cellIndex]) }));
    // Missing values come last in either order.
    rows.sort((a, b) => (a.key === null) - (b.key === null)
      || (a.key === null ? 0 : (down ? -1 : 1) * compare(a.key, b.key)));
    body.append(...rows.map((entry) => entry.row));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    for (const heading of table.tHead.rows[0].cells) {
      heading.querySelector("button").addEventListener("click", () => sort(table, heading));
    }
    const input = table.closest(".table-block").querySelector("input");
    filter(input, Array.from(table.tBodies[0].rows), "rows");
  }
  const boxes = document.getElementById("filter-boxes");
  if (boxes) filter(boxes, Array.from(document.querySelectorAll(".box")), "runs");

  // A link to a run opens its box.
  const open = () => {
    const box = location.hash.startsWith("#run-") && document.getElementById(location.hash.slice(1));
    if (!box) return;
    box.hidden = false;
    box.open = true;
    box.scrollIntoView();
  };
  addEventListener("hashchange", open);
  // The link that was followed last changes no hash, and its box may be closed since.
  addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#run-"]');
    if (link && link.hash === location.hash) open();
  });
  open();
})();
