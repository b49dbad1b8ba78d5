"use strict";
// Fetches the page anew and puts what changed into this one, so that focus and scroll stay where they are.
(() => {
  const every = Number(document.body.dataset.every) * 1000;
  const at = (id) => document.getElementById(id);
  const pause = at("pause");
  let answered = Date.now();
  let timer = 0;

  const lost = () => {
    const text = `The monitor has not answered for ${Math.round((Date.now() - answered) / 1000)} s. How the jobs are now is unknown; below is what was known before.`;
    at("lost").textContent = text;
    at("lost").hidden = false;
    document.title = "Unknown: the monitor does not answer";
  };

  const look = async () => {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(2 * every + 5000) });
      if (!answer.ok) throw new Error(answer.status);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const id of ["summary", "live", "stamp"]) {
        const now = at(id);
        const next = fresh.getElementById(id);
        // A screen reader reads the summary out whenever it is touched.
        if (now.innerHTML !== next.innerHTML) now.innerHTML = next.innerHTML;
        if (now.className !== next.className) now.className = next.className;
      }
      document.title = fresh.title;
      answered = Date.now();
      at("lost").hidden = true;
    } catch {
      lost();
    }
    if (pause.getAttribute("aria-pressed") === "false") timer = setTimeout(look, every);
  };

  pause.hidden = false;
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") === "false";
    pause.setAttribute("aria-pressed", String(paused));
    clearTimeout(timer);
    if (!paused) look();
  });
  timer = setTimeout(look, every);
})();
