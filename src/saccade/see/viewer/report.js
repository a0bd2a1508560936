"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { words, heads, causal } = data;
  const size = words.length;
  const LEAST = 5; // hundredths: what sentences and the text show of a word's weights
  const perHead = causal ? (size * (size + 1)) / 2 : size * size;
  const bytes = Uint8Array.from(atob(data.weights), (c) => c.charCodeAt(0));
  const $ = (id) => document.getElementById(id);
  const passage = $("passage"), map = $("map");
  const spans = [...passage.querySelectorAll(".w")];
  const tiles = [...document.querySelectorAll(".tile")];
  const links = [...document.querySelectorAll(".findings a")];
  const at = (layer, number) => heads.findIndex((h) => h.layer === layer && h.head === number);
  let head = at(data.focus.layer, data.focus.head);
  let word = data.focus.query;

  // Hundredths: row q of a head holds the keys 0..q, or all of them where words look ahead.
  const end = (q) => (causal ? q + 1 : size);
  const weight = (h, q, k) => (k >= end(q) ? 0 : bytes[h * perHead + (causal ? (q * (q + 1)) / 2 : q * size) + k]);
  const number = (n) => (n >= 100 ? "1.00" : "." + String(n).padStart(2, "0"));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function partners(h, i) {
    const from = [], by = [];
    for (let k = 0; k < size; k++) if (weight(h, i, k)) from.push([k, weight(h, i, k)]);
    for (let q = 0; q < size; q++) if (q !== i && weight(h, q, i)) by.push([q, weight(h, q, i)]);
    const larger = (a, b) => b[1] - a[1] || a[0] - b[0];
    return [from.sort(larger), by.sort(larger)];
  }

  function quoted(tag, i) {
    const out = document.createElement(tag);
    out.dir = "auto"; // a word written from right to left must not turn the sentence around
    out.textContent = `‘${words[i]}’`;
    return out;
  }

  function list(pairs, most) {
    const shown = pairs.filter(([, n]) => n >= LEAST).slice(0, most);
    const out = document.createDocumentFragment();
    shown.forEach(([i, n], at) => {
      const value = document.createElement("i");
      value.textContent = number(n);
      out.append(at ? ", " : "", quoted("bdi", i), " ", value);
    });
    return shown.length ? out : document.createTextNode("nothing with .05 or more");
  }

  function read(into, h, i) {
    const [from, by] = partners(h, i);
    into.replaceChildren(`In layer ${heads[h].layer} head ${heads[h].head} `, quoted("b", i), " looks at ", list(from, 5));
    if (!causal || i + 1 < size) into.append("; looked at by ", list(by, 5));
    into.append(".");
  }

  function paintWords(i) {
    const [from, by] = partners(head, i);
    spans.forEach((s) => {
      s.classList.remove("from", "by", "strong", "chosen");
      s.removeAttribute("data-n");
      s.setAttribute("aria-pressed", "false");
    });
    const mark = (kind) => ([j, n]) => {
      if (n < LEAST) return; // the sentence calls it nothing
      const s = spans[j];
      s.classList.add(kind);
      if (kind === "from") s.classList.toggle("strong", n >= 78); // what looks as well keeps its white letters
      s.style.setProperty(kind === "from" ? "--a" : "--b", n / 100);
      if (!s.dataset.n) s.dataset.n = number(n);
    };
    from.forEach(mark("from"));
    by.forEach(mark("by"));
    spans[i].classList.add("chosen");
    spans[i].setAttribute("aria-pressed", "true");
  }

  function show(i) {
    paintWords(i);
    read($("reading"), head, i);
    read($("map-reading"), head, i);
    drawMap(i);
  }

  function choose(h, i, remember = true) {
    head = h;
    word = i;
    tiles.forEach((t, j) => {
      t.setAttribute("aria-pressed", String(j === h));
      t.tabIndex = j === h ? 0 : -1;
    });
    spans.forEach((s, j) => (s.tabIndex = j === i ? 0 : -1));
    $("large-name").textContent = `Layer ${heads[h].layer} head ${heads[h].head}`;
    $("about").textContent = heads[h].about;
    const told = h === at(data.focus.layer, data.focus.head); // what is said of words elsewhere is about this head alone
    document.querySelectorAll(".outside").forEach((p) => (p.hidden = !told));
    const place = `${heads[h].layer}.${heads[h].head}.${i}`;
    links.forEach((a) => (a.hash === "#" + place ? a.setAttribute("aria-current", "true") : a.removeAttribute("aria-current")));
    if (remember) try { history.replaceState(null, "", "#" + place); } catch { /* some browsers forbid it for files */ }
    show(i);
  }

  // The small maps: of many words a dot is the largest weight of several, or single ones would fade to grey

  function drawTiles() {
    const [r, g, b] = css("--accent-rgb").split(",").map(Number);
    const side = Math.min(size, 48), dot = (i) => Math.floor((i * side) / size);
    tiles.forEach((tile, h) => {
      const canvas = tile.firstElementChild, largest = new Uint8Array(side * side);
      canvas.width = canvas.height = side;
      const context = canvas.getContext("2d"), image = context.createImageData(side, side);
      for (let q = 0; q < size; q++) for (let k = 0; k < end(q); k++) {
        const i = dot(q) * side + dot(k);
        largest[i] = Math.max(largest[i], weight(h, q, k));
      }
      largest.forEach((n, i) => image.data.set([r, g, b, 2.55 * n], 4 * i));
      context.putImageData(image, 0, 0);
    });
  }

  // The large map: a triangle, each row ending in its word, right above that word's own column; or a square, each row
  // and each column with its word

  let cell = 0, top = 0;
  function drawMap(chosen) {
    const room = map.parentElement.clientWidth, scale = window.devicePixelRatio || 1;
    const context = map.getContext("2d");
    const font = (px) => `${px}px ${css("--serif")}`;
    context.font = font(16);
    // The last words must fit beside the map: the label of row q starts at column end(q).
    const longest = Math.max(...words.map((w, q) => context.measureText(w).width / 16 * 0.9 - (size - end(q))));
    const across = size + Math.max(0.5, longest) + 0.6, labels = room / across >= 8.5 || size <= 100;
    // Words must stay readable: rather a map that scrolls sideways than one without them, unless there are too many.
    cell = labels ? Math.max(8.5, Math.min(34, room / across)) : room / size;
    const text = Math.min(16, cell * 0.86), width = labels ? Math.max(room, cell * across) : room;
    top = causal || !labels ? 0 : Math.ceil(longest * cell) + 6;
    const height = top + Math.ceil(cell * size) + 2;
    map.style.width = width + "px";
    map.style.height = height + "px";
    map.width = Math.round(width * scale);
    map.height = Math.round(height * scale);
    context.scale(scale, scale);
    context.translate(0, top);
    const ink = css("--ink"), quiet = css("--quiet"), accent = css("--accent-rgb"), line = css("--line");
    const gap = cell > 8 ? 1 : 0;
    for (let q = 0; q < size; q++) {
      for (let k = 0; k < end(q); k++) {
        const n = weight(head, q, k);
        context.fillStyle = n ? `rgba(${accent}, ${Math.max(0.05, n / 100)})` : line;
        if (n) context.fillRect(k * cell, q * cell, cell - gap, cell - gap);
        else if (gap) context.fillRect(k * cell + cell / 2 - 1, q * cell + cell / 2 - 1, 1.5, 1.5);
        if (cell >= 24 && n >= 5) {
          context.fillStyle = n >= 78 ? css("--on-accent") : ink;
          context.font = `${cell * 0.38}px ${css("--sans")}`;
          context.textAlign = "center";
          context.textBaseline = "middle";
          context.fillText(number(n), k * cell + (cell - gap) / 2, q * cell + cell / 2);
        }
      }
      if (labels) {
        context.font = (q === chosen ? "bold " : "") + font(text);
        context.textAlign = "left";
        context.textBaseline = "middle";
        context.fillStyle = q === chosen || weight(head, chosen, q) >= 20 ? ink : quiet;
        context.fillText(words[q], end(q) * cell + Math.max(3, cell * 0.2), q * cell + cell / 2);
        if (top) {
          context.save();
          context.translate(q * cell + cell / 2, -4);
          context.rotate(-Math.PI / 2);
          context.fillText(words[q], 0, 0);
          context.restore();
        }
      }
    }
    context.strokeStyle = quiet;
    context.lineWidth = 1;
    context.setLineDash([4, 3]);
    context.beginPath();
    for (const at of data.breaks) { // one passage of the text ends and another begins
      context.moveTo(at * cell - 0.5, causal ? at * cell : 0);
      context.lineTo(at * cell - 0.5, size * cell);
      context.moveTo(0, at * cell - 0.5);
      context.lineTo((causal ? at : size) * cell, at * cell - 0.5);
    }
    context.stroke();
    context.setLineDash([]);
    context.strokeStyle = ink;
    context.lineWidth = cell > 8 ? 1.5 : 1;
    context.strokeRect(0.75, chosen * cell + 0.25, end(chosen) * cell - 1.5, Math.max(1, cell - 1));
  }

  function rowAt(event) {
    const box = map.getBoundingClientRect();
    const q = Math.floor((event.clientY - box.top - top) / cell);
    return q >= 0 && q < size ? q : null;
  }

  // Pointer, touch and keys

  const steps = { ArrowLeft: -1, ArrowRight: 1 };
  passage.addEventListener("pointerover", (e) => {
    if (e.pointerType === "mouse" && e.target.dataset.i) show(Number(e.target.dataset.i));
  });
  passage.addEventListener("pointerleave", () => show(word));
  passage.addEventListener("click", (e) => e.target.dataset.i && choose(head, Number(e.target.dataset.i)));
  passage.addEventListener("focusin", (e) => e.target.dataset.i && e.target.matches(":focus-visible") && choose(head, Number(e.target.dataset.i), false));
  passage.addEventListener("keydown", (e) => {
    const at = Number(e.target.dataset.i);
    const to = e.key === "Home" ? 0 : e.key === "End" ? size - 1 : at + (steps[e.key] || 0);
    if (e.key === "Enter" || e.key === " ") choose(head, at);
    else if (to === at || to < 0 || to >= size) return;
    else { choose(head, to, false); spans[to].focus(); }
    e.preventDefault();
  });
  tiles.forEach((tile, h) => {
    tile.addEventListener("click", () => {
      choose(h, word);
      if (map.getBoundingClientRect().top > innerHeight - 120) $("large-name").scrollIntoView({ block: "start", behavior: "smooth" });
    });
    tile.addEventListener("keydown", (e) => {
      const down = { ArrowUp: -1, ArrowDown: 1 }[e.key];
      const to = down ? at(heads[h].layer + down, heads[h].head) : h + (steps[e.key] || 0);
      if (to === h || to < 0 || to >= heads.length) return;
      e.preventDefault();
      choose(to, word);
      tiles[to].focus();
    });
  });
  map.addEventListener("pointermove", (e) => e.pointerType === "mouse" && rowAt(e) !== null && show(rowAt(e)));
  map.addEventListener("pointerleave", () => show(word));
  map.addEventListener("click", (e) => rowAt(e) !== null && choose(head, rowAt(e)));

  function follow(scroll) {
    const m = /^#(\d+)\.(\d+)(?:\.(\d+))?$/.exec(location.hash);
    const to = m ? at(Number(m[1]), Number(m[2])) : -1;
    if (to < 0) return false;
    choose(to, Math.min(Number(m[3] ?? word), size - 1), false);
    if (scroll) passage.scrollIntoView({ block: "center", behavior: "smooth" });
    return true;
  }
  window.addEventListener("hashchange", () => follow(true));
  window.addEventListener("resize", () => drawMap(word));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawTiles(); drawMap(word); });

  drawTiles();
  if (!follow(false)) choose(head, word, false);
})();
