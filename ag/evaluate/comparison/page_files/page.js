"use strict";

// Tables: a click on a head, or Enter or Space on it, sorts by its column; again, the other way round. A cell counts by
// the number that it begins with; names count as texts, and cells without a result come last, both ways.
function sortKey(cell) {
  const text = cell.textContent, number = parseFloat(text.replace(/^< /, ""));
  if (text === "" || text.startsWith("none")) return "";
  return cell.cellIndex === 0 || isNaN(number) ? text : number;
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => {
        const [a, b] = [sortKey(one.cells[column]), sortKey(other.cells[column])];
        if (a === "" || b === "") return (a === "") - (b === "");
        const order = typeof a === "string" || typeof b === "string" ? `${a}`.localeCompare(`${b}`) : a - b;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

// Wide tables say that they go on, until their end is reached. All are measured before anything is changed, and only
// where they are shown: a page of thousands of results would be laid out again for each.
function look(boxes) {
  const more = boxes.map((box) => box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  boxes.forEach((box, index) => {
    box.classList.toggle("more", more[index]);
    box.nextElementSibling.hidden = !more[index];
  });
}
const sizes = new ResizeObserver((entries) => look(entries.map((entry) => entry.target)));
for (const box of document.querySelectorAll(".scroll")) {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = "more columns: scroll sideways →";
  hint.hidden = true;
  box.after(hint);
  box.addEventListener("scroll", () => look([box]));
  sizes.observe(box);
}

// The viewer: texts are set as textContent only, so that no prompt can become part of the page.
const prompts = JSON.parse(document.getElementById("data").textContent).prompts;
const [prompt, policy, layer, head] = ["prompt", "policy", "layer", "head"].map((id) => document.getElementById(id));

function choices(select, names) {
  const before = select.selectedOptions[0]?.textContent;
  select.replaceChildren(...names.map((name, index) => {
    const option = document.createElement("option");
    option.textContent = name;
    option.value = index;
    option.selected = name === before;
    return option;
  }));
}

function numbered(word, count) {
  return [`all ${word}s`, ...Array.from({ length: count }, (_, index) => `${index}`)];
}

function chosen(select, list) {
  return select.value === "0" ? list : [list[select.value - 1]];
}

function showPolicies() {
  const policies = prompts[prompt.value].policies;
  const first = policy.options.length === 0;
  choices(policy, policies.map((one) => one.name));
  if (first) policy.value = Math.max(0, policies.findIndex((one) => one.evicts));
  showLayers();
}

function showLayers() {
  const kept = prompts[prompt.value].policies[policy.value].kept;
  choices(layer, numbered("layer", kept.length));
  choices(head, numbered("head", kept[0].length));
  showTokens();
}

function showTokens() {
  const { pieces, policies } = prompts[prompt.value];
  const rows = chosen(layer, policies[policy.value].kept).flatMap((heads) => chosen(head, heads)).map(atob);
  const counts = pieces.map((_, token) => rows.filter((bits) => (bits.charCodeAt(token >> 3) >> (token & 7)) & 1).length);
  document.getElementById("text").replaceChildren(...pieces.map((piece, token) => {
    const element = document.createElement(counts[token] ? "span" : "del");
    element.textContent = piece;
    element.title = `token ${token}: ` + (rows.length > 1 ? `kept by ${counts[token]} of ${rows.length}` : counts[token] ? "kept" : "evicted");
    if (rows.length > 1) element.style.setProperty("--share", counts[token] / rows.length);
    return element;
  }));
  const kept = counts.reduce((sum, count) => sum + count, 0);
  const share = (100 * kept / (rows.length * pieces.length)).toFixed(1);
  document.getElementById("summary").textContent = rows.length > 1
    ? `${share} % of the entries of ${pieces.length} tokens in ${rows.length} heads kept`
    : `${kept} of ${pieces.length} tokens kept (${share} %)`;
}

if (prompts.length) {
  choices(prompt, prompts.map((one) => one.name));
  prompt.addEventListener("change", showPolicies);
  policy.addEventListener("change", showLayers);
  layer.addEventListener("change", showTokens);
  head.addEventListener("change", showTokens);
  showPolicies();
} else {
  document.getElementById("tokens").hidden = true;
}
