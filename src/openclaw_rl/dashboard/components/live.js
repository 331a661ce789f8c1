// Keeps an open page up to date: listens for changes, fetches the view again, and changes only what differs.
// Nothing that people or models wrote is put together as markup here: the server has escaped it.

const main = document.querySelector("main.view");
const state = document.querySelector(".live");
const token = document.body.dataset.token;
const WORDS = { live: "live", lost: "connection lost", wait: "connecting" };

function show(kind) {
  if (!state) return;
  state.dataset.state = kind;
  state.textContent = WORDS[kind];
}

// --- Changing a part of the page in place -------------------------------------------------------------------------

const keyOf = (node) => (node.nodeType === 1 ? node.id || null : null);

function sync(old, next) {
  if (old.nodeType === 3) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  if (old.nodeType !== 1 || old.isEqualNode(next)) return;
  // What was loaded on demand stays, and so does what somebody is typing.
  if (old.hasAttribute("data-keep") || ["INPUT", "TEXTAREA", "SELECT"].includes(old.tagName)) return;
  for (const { name } of [...old.attributes])
    if (!next.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of next.attributes)
    if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  syncChildren(old, next);
}

function syncChildren(old, next) {
  const named = new Map([...old.children].filter(keyOf).map((child) => [child.id, child]));
  let place = old.firstChild;
  for (const wanted of [...next.childNodes]) {
    const key = keyOf(wanted);
    let match = key ? named.get(key) : place;
    if (!key && match && (match.nodeType !== wanted.nodeType || match.nodeName !== wanted.nodeName || keyOf(match))) match = null;
    if (match && match.nodeName === wanted.nodeName) {
      if (match !== place) old.insertBefore(match, place);
      sync(match, wanted);
      place = match.nextSibling;
    } else {
      const added = document.importNode(wanted, true);
      if (key && added.classList) added.classList.add("fresh");
      old.insertBefore(added, place);
    }
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

// However much happens, a page is not fetched more often than this.
const MIN_REFRESH_MS = 800;
let refreshing = false;
let again = false;

async function refresh() {
  if (refreshing || document.hidden) {
    again = true;
    return;
  }
  refreshing = true;
  again = false;
  const begun = performance.now();
  try {
    const answer = await fetch(location.href, { headers: { "X-Part": "main" } });
    if (answer.status === 401) return void location.reload();
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const version = page.querySelector("[data-version]");
    const shown = document.querySelector(".version");
    if (version && shown) shown.textContent = `policy ${version.dataset.version}`;
    const atEnd = window.innerHeight + window.scrollY >= document.body.scrollHeight - 80;
    syncChildren(main, page.querySelector("main.view"));
    if (atEnd && main.dataset.follow !== undefined) window.scrollTo({ top: document.body.scrollHeight });
  } catch {
    show("lost");
  } finally {
    setTimeout(() => {
      refreshing = false;
      if (again) refresh();
    }, Math.max(0, MIN_REFRESH_MS - (performance.now() - begun)));
  }
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && again) refresh();
});

// --- Events ---------------------------------------------------------------------------------------------------------

function concerns(change) {
  const wants = (main.dataset.wants || "").split(" ");
  if (!change.complete || change.deleted) return true;
  if (main.dataset.session) return change.sessions.includes(Number(main.dataset.session));
  return ["sessions", "updates", "practices"].some((kind) => wants.includes(kind) && change[kind].length > 0);
}

if (main && document.body.dataset.cursor !== undefined) {
  const view = main.dataset.wants && main.dataset.wants.includes("pulse") ? "&pulse=1" : "";
  const events = new EventSource(`/dashboard/events?since=${document.body.dataset.cursor}${view}`);
  show("wait");
  events.onopen = () => show("live");
  events.onerror = () => {
    show("lost");
    // A login that has ended closes the stream for good.
    if (events.readyState === EventSource.CLOSED) setTimeout(refresh, 2000);
  };
  events.addEventListener("pulse", refresh);
  events.addEventListener("change", (event) => {
    const change = JSON.parse(event.data);
    if (concerns(change)) refresh();
  });
  addEventListener("pagehide", () => events.close());
}

// --- Actions --------------------------------------------------------------------------------------------------------

function toast(text) {
  document.querySelector(".toast")?.remove();
  const note = document.createElement("div");
  note.className = "toast";
  note.setAttribute("role", "status");
  note.textContent = text;
  document.body.append(note);
  setTimeout(() => note.remove(), 6000);
}

function confirmed(question) {
  return new Promise((decide) => {
    const dialog = document.createElement("dialog");
    const text = document.createElement("p");
    text.textContent = question;
    const buttons = document.createElement("div");
    buttons.className = "buttons";
    for (const [label, value, style] of [["Cancel", "", ""], ["Yes, do it", "yes", "main"]]) {
      const button = document.createElement("button");
      button.textContent = label;
      button.className = style;
      button.onclick = () => dialog.close(value);
      buttons.append(button);
    }
    dialog.append(text, buttons);
    dialog.onclose = () => {
      dialog.remove();
      decide(dialog.returnValue === "yes");
    };
    document.body.append(dialog);
    dialog.showModal();
  });
}

async function send(path, fields) {
  const body = new URLSearchParams({ ...fields, token });
  return fetch(path, { method: "POST", body, headers: { "X-Part": "main" } });
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.matches("form[data-action]")) return;
  event.preventDefault();
  const fields = Object.fromEntries(new FormData(form, event.submitter));
  if (form.dataset.question && !(await confirmed(form.dataset.question))) return;
  for (const button of form.querySelectorAll("button")) button.disabled = true;
  try {
    const answer = await send(form.getAttribute("action"), fields);
    const said = await answer.json();
    toast(said.message);
    if (answer.ok && said.location) return void (location.href = said.location);
    if (answer.ok) form.reset();
    refresh();
  } catch {
    toast("The server did not answer.");
  } finally {
    for (const button of form.querySelectorAll("button")) button.disabled = false;
  }
});

// Parts that are loaded when they are opened, such as the tokens of an answer.
document.addEventListener(
  "toggle",
  async (event) => {
    const details = event.target;
    if (!details.open || !details.dataset.src || details.hasAttribute("data-keep")) return;
    details.setAttribute("data-keep", "");
    const answer = await fetch(details.dataset.src, { headers: { "X-Part": "main" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    details.append(...page.body.childNodes);
  },
  true,
);

document.addEventListener("pointerover", (event) => {
  const piece = event.target.closest?.(".tokens span[title]");
  const inspector = piece?.closest(".more, .turn")?.querySelector(".inspect");
  if (inspector) inspector.textContent = piece.title;
});
