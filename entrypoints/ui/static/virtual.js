// A list of any length of which only the rows near the window are in the document; the window scrolls, not the list.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

const SPARE = 8; // rows above and below the window

/** Shows `count` rows of `height` pixels. `row(index, style)` returns a row, whose place is in its `style`; `need(from, to)` is told which are shown;
 * `active`: index of the row that keys have chosen, which is scrolled into the window when it changes. */
export function VirtualList({ count, height, row, need, active, label }) {
  const list = useRef();
  const [[from, to], setShown] = useState([0, 40]);
  useLayoutEffect(() => {
    const look = () => {
      if (!list.current) return;
      const above = -list.current.getBoundingClientRect().top;
      const first = Math.max(0, Math.floor(above / height) - SPARE);
      const last = Math.min(count, Math.ceil((above + innerHeight) / height) + SPARE);
      setShown((old) => (old[0] === first && old[1] === last ? old : [first, last]));
    };
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [count, height]);
  useEffect(() => {
    if (to > from) need(from, to);
  });
  useEffect(() => {
    if (active === null || !list.current) return;
    const top = list.current.getBoundingClientRect().top + active * height;
    if (top < 80) scrollBy(0, top - 80); // below what sticks to the window's top
    else if (top + height > innerHeight) scrollBy(0, top + height - innerHeight + 8);
  }, [active]);
  const shown = [];
  for (let index = from; index < Math.min(to, count); index++) {
    shown.push(row(index, { top: `${index * height}px`, height: `${height}px` }));
  }
  return html`<div class="virtual" ref=${list} role="rowgroup" aria-label=${label} style=${{ height: `${count * height}px` }}>${shown}</div>`;
}
