// Faults of a page of the documentation at the window's width, a sentence each.
const faults = [], whole = document.scrollingElement;
const rolls = item => {
  for (let e = item; e && e !== document.body; e = e.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
  return false;
};
if (whole.scrollWidth > whole.clientWidth) faults.push(`the page is ${whole.scrollWidth} wide`);
for (const item of document.querySelectorAll("article pre > code, article table, article math")) {
  const box = item.getBoundingClientRect();
  const wide = box.right > innerWidth + 1 || item.scrollWidth > item.clientWidth + 1;
  if (item.checkVisibility() && wide && !rolls(item))
    faults.push(`cut off: ${item.textContent.trim().slice(0, 40)}`);
}
// what rolls sideways shows at its edges that there is more
for (const item of document.querySelectorAll("article *")) {
  const style = getComputedStyle(item);
  if (["auto", "scroll"].includes(style.overflowX) && item.scrollWidth > item.clientWidth + 1
      && !style.backgroundAttachment.includes("local"))
    faults.push(`rolls without a sign: ${item.textContent.trim().slice(0, 40)}`);
}
// a key is on one line, unless the word that it stands in is wider than the line
const lines = (text, start, end) => {
  const range = document.createRange();
  range.setStart(text, start);
  range.setEnd(text, end);
  const parts = [...range.getClientRects()].filter(part => part.width);
  return [new Set(parts.map(part => Math.round(part.top))).size, parts.reduce((sum, part) => sum + part.width, 0)];
};
for (const item of document.querySelectorAll("article :not(pre) > code")) {
  const text = item.firstChild, room = item.closest("p, li, td, th, dd, h1, h2, h3")?.clientWidth;
  if (text?.nodeType !== Node.TEXT_NODE || !room || !item.checkVisibility()) continue;
  for (const word of text.data.matchAll(/\S+/g)) {
    if (lines(text, word.index, word.index + word[0].length)[1] > room - 20) continue;
    for (const key of word[0].matchAll(/[\w.]+/g)) {
      const start = word.index + key.index;
      if (lines(text, start, start + key[0].length)[0] > 1) faults.push(`broken in a word: ${key[0]}`);
    }
  }
}
for (const image of document.querySelectorAll("article img")) {
  if (!image.alt) faults.push(`no alt text: ${image.src}`);
  if (!image.naturalWidth) faults.push(`no picture: ${image.src}`);
}
return faults;
