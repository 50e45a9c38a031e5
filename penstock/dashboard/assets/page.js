// What every page does in the browser itself: it watches its link to the broker, and a few keys.
//
// A page whose link is lost says so and tries again. A broker that was restarted knows nothing of this
// page: it is loaded again, but only once the broker answers, so that a page never ends as the browser's
// own error page. A broker that answers and refuses the link has forgotten who this visitor is, or there is a
// proxy that lets no websocket pass: the page is loaded again for the former, and says so for the latter.
//
// What is clicked while the link is lost is not done, and the page says so: it would wait in the browser, and
// be done whenever the link is back.
(() => {
  const banner = document.getElementById("ps-link");
  const RETRY_MS = 1000;
  const PATIENCE_MS = 700; // a link that comes back at once is not worth a word
  const REFUSALS = 3; // so many in a row, while the broker answers, are no accident
  const RELOAD_MS = 60000; // a page that was loaded again and is refused again is not helped by a third time
  const LOST = "The link to the broker is lost. This page comes back by itself.";
  const UNDONE = "Not done: the link to the broker is lost. Try again when this page is back.";
  const REFUSED = "The broker answers, and the link to it is refused. A proxy between must let websockets pass.";
  let telling = null;
  let returning = false;
  let refusals = 0;

  function say(text) {
    banner.textContent = text;
    banner.hidden = text === "";
    document.documentElement.classList.toggle("ps-stale", text !== "");
  }

  function lost() {
    if (telling !== null) return;
    telling = setTimeout(() => say(LOST), PATIENCE_MS);
  }

  function found() {
    refusals = 0;
    clearTimeout(telling);
    telling = null;
    say("");
  }

  async function answers() {
    try {
      return (await fetch("/healthz", { cache: "no-store" })).ok;
    } catch {
      return false; // nobody is there yet
    }
  }

  async function comeBack() {
    if (returning) return;
    returning = true;
    lost();
    while (!(await answers())) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    location.reload();
  }

  async function refused() {
    refusals = (await answers()) ? refusals + 1 : 0;
    if (refusals < REFUSALS || window.socket.connected) return;
    const last = Number(sessionStorage.getItem("penstock-reloaded"));
    if (Date.now() - last < RELOAD_MS) {
      say(REFUSED);
      return;
    }
    sessionStorage.setItem("penstock-reloaded", String(Date.now()));
    comeBack();
  }

  function watch() {
    const socket = window.socket;
    if (!socket) {
      setTimeout(watch, 20);
      return;
    }
    // NiceGUI's own handlers load the page again whether anybody answers or not.
    socket.off("connect_error");
    socket.off("try_reconnect");
    socket.on("connect_error", (error) => {
      lost();
      if (error.message === "Implicit handshake failed") comeBack();
      else refused();
    });
    socket.on("try_reconnect", comeBack);
    socket.on("disconnect", (reason) => {
      lost();
      if (reason === "io server disconnect") comeBack();
    });
    socket.on("connect", found);
    socket.io.opts.reconnectionDelay = 500;
    socket.io.reconnectionDelay(500);
    socket.io.reconnectionDelayMax(2000);
    if (!socket.connected) lost();
    window.penstockTheme.apply();
  }
  watch();

  function refuse(event) {
    // What the browser does by itself goes on: tables, colours, links, signing out, closing a message.
    const it = event.target.closest?.(event.type === "submit" ? "form" : "button");
    if (!it || window.socket?.connected || it.closest(".ps-live, .ps-local, .ps-header, .q-notification")) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    lost();
    clearTimeout(telling);
    say(UNDONE);
  }
  document.addEventListener("click", refuse, true);
  document.addEventListener("submit", refuse, true);

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = document.activeElement;
    if (at && (at.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName))) return;
    const search = document.querySelector("[data-ps-search]");
    if (!search) return;
    event.preventDefault();
    search.focus();
    search.select();
  });
})();
