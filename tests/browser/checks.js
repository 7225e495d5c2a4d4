// Faults of the page as it is shown, a sentence each. test_checks.py's table has a page for each.
const faults = [], fault = (what, where, value) => faults.push(`${what}: ${value} (${where})`);
const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const colours = new Map();
const rgba = text => {
  if (!colours.has(text)) {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    colours.set(text, [r, g, b, a / 255]);
  }
  return colours.get(text);
};
const over = ([r, g, b, a], below) => [r, g, b].map((v, i) => a * v + (1 - a) * below[i]);
const ancestors = item => item ? [item, ...ancestors(item.parentElement)] : [];
const opacity = item => ancestors(item).reduce((all, e) => all * getComputedStyle(e).opacity, 1);
const behind = item => ancestors(item).reverse().reduce(
  (below, e) => over(rgba(getComputedStyle(e).backgroundColor), below), rgba("Canvas"));
const light = colour => colour.slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (colour, item, share = 1) => {
  const ground = behind(item), [r, g, b, a] = rgba(colour);
  const pair = [light(over([r, g, b, a * share], ground)), light(ground)];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
};
const said = item => item.textContent.trim().slice(0, 40);

// text: contrast, size, whole
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const item = walk.currentNode.parentElement, range = document.createRange();
  range.selectNodeContents(walk.currentNode);
  const box = range.getBoundingClientRect(), style = getComputedStyle(item), svg = item.closest("svg");
  const hidden = !item.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || item.closest("script, title");
  if (!walk.currentNode.data.trim() || hidden || !box.width) continue;
  const size = parseFloat(style.fontSize) * (svg ? item.getScreenCTM().a : 1);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  const found = contrast(svg ? style.fill : style.color, item, opacity(item));
  if (found < (large ? 3 : 4.5)) fault("contrast of text", said(item), found.toFixed(2));
  if (size < 10.99) fault("small text", said(item), size.toFixed(1));
  const roll = ancestors(item).find(e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX));
  for (const around of ancestors(item)) {
    if (around === roll || around === document.body) break;
    const clips = around === svg || getComputedStyle(around).overflowX !== "visible";
    const outer = around.getBoundingClientRect();
    if (clips && (box.left < outer.left - 1 || box.right > outer.right + 1
      || box.top < outer.top - 1 || box.bottom > outer.bottom + 1)) fault("clipped text", said(item), around.tagName);
  }
  if (!roll && (box.left < 0 || box.right > innerWidth + 1)) fault("text beyond the page", said(item), box.right);
}
const whole = document.scrollingElement;
if (whole.scrollWidth > whole.clientWidth) fault("overflow", "page", whole.scrollWidth);

// colours of charts, where they are drawn at full strength: faint areas lie behind a line
const DRAWN = "svg path, svg line, svg rect, svg circle, .bar span, .legend i, .track i, .track u";
for (const item of document.querySelectorAll(DRAWN)) {
  const style = getComputedStyle(item), svg = item.closest("svg");
  if (item.matches(".rule, .mark, .hit *") || opacity(item) < 1 || !item.checkVisibility()) continue;
  const drawn = svg ? [style.stroke, style.fillOpacity < 1 ? "none" : style.fill] : [style.backgroundColor];
  for (const colour of drawn.filter(c => c !== "none" && rgba(c)[3])) {
    const found = contrast(colour, svg ?? item.parentElement);
    if (found < 3) fault("contrast of chart", svg?.ariaLabel ?? said(item.parentElement), found.toFixed(2));
  }
}

for (const table of document.querySelectorAll("table")) {
  const rows = [...table.rows].map(row => [...row.cells].map(cell => cell.textContent.trim()));
  const [heads, ...body] = rows.filter(row => row.length === rows[0].length);
  heads.forEach((head, i) => heads.slice(0, i).forEach((other, j) => {
    // before and after may be equal, as a result
    const sides = [head, other].some(name => /^(before|after)\b/.test(name));
    const measured = !sides && body.length && body.every(row => row[i] === row[j]) && body.some(row => row[i].includes("."));
    if (measured || (head && head === other)) fault("column twice", head, other);
  }));
}
for (const item of document.querySelectorAll(".pair img, .pair video"))
  if (item.checkVisibility() && item.getBoundingClientRect().width < 120) fault("narrow pair", item.alt, item.width);
return faults;
