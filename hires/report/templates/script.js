"use strict";
// Sorts and filters the tables. Without it the page shows everything in the order of the report.
(() => {
  const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  const holds = (text, wanted) => wanted.every((word) => text.includes(word));

  // Shows what holds all words, and says how many of how many that are.
  const filter = (input, items, status, what) => {
    const texts = new Map();
    const textOf = (item) => {
      if (!texts.has(item)) texts.set(item, item.textContent.toLowerCase());
      return texts.get(item);
    };
    const apply = () => {
      const wanted = words(input.value);
      let shown = 0;
      for (const item of items) {
        item.hidden = wanted.length > 0 && !holds(textOf(item), wanted);
        shown += item.hidden ? 0 : 1;
      }
      const all = items.length;
      status.textContent = shown === all ? `${all} ${what}` : `${shown} of ${all} ${what}`;
    };
    input.addEventListener("input", apply);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { input.value = ""; apply(); }
    });
  };

  // A number is sorted by its full value, a text by letters and the numbers in it.
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const keyOf = (row, index) => {
    const cell = row.cells[index];
    const value = cell.dataset.v;
    if (value === undefined) return { text: cell.textContent.trim() };
    return { number: value === "" ? null : Number(value) };
  };
  const compare = (a, b) => {
    if (a.text !== undefined) return order.compare(a.text, b.text);
    return a.number - b.number;
  };
  const unknown = (key) => key.number === null || key.text === "-";

  const sort = (table, heading) => {
    const index = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row, index) }));
    // Missing values come last in either order.
    rows.sort((a, b) => {
      const gone = unknown(a.key) - unknown(b.key);
      return gone || (unknown(a.key) ? 0 : (down ? -1 : 1) * compare(a.key, b.key));
    });
    body.append(...rows.map((entry) => entry.row));
  };

  for (const block of document.querySelectorAll(".table-block")) {
    const table = block.querySelector("table.sortable");
    if (!table) continue;
    for (const heading of table.tHead.rows[0].cells) {
      const button = heading.querySelector("button");
      if (button) button.addEventListener("click", () => sort(table, heading));
    }
    const input = block.querySelector(".filter");
    filter(input, Array.from(table.tBodies[0].rows), block.querySelector(".rows"), "rows");
  }

  const boxes = document.querySelector(".filter-boxes");
  if (boxes) {
    const status = boxes.parentElement.querySelector(".rows");
    filter(boxes, Array.from(document.querySelectorAll(".box")), status, "runs");
  }

  // A link to a run opens its box.
  const open = () => {
    const box = location.hash.startsWith("#run-") && document.getElementById(location.hash.slice(1));
    if (box) {
      box.hidden = false;
      box.open = true;
      box.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  // The link that was followed last changes no hash, and its box may be closed since.
  addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#run-"]');
    if (link && link.hash === location.hash) open();
  });
  open();

  // Paper shows everything; the screen gets back what was closed.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = Array.from(document.querySelectorAll("details:not([open])"));
    if (opened.length > 200) opened = [];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });
})();
