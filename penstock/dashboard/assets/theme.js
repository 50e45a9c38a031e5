// Light, dark, or as the system has it. Runs in the head, so that nothing is drawn in the wrong colours.
//
// The choice is kept in this browser. `data-theme` of the root element is what the style sheet goes by;
// Quasar's own components are told too, once they are there.
(() => {
  const CHOICES = ["auto", "light", "dark"];
  const LABELS = { auto: "Auto", light: "Light", dark: "Dark" };
  const system = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      const kept = localStorage.getItem("penstock-theme");
      return CHOICES.includes(kept) ? kept : "auto";
    } catch {
      return "auto"; // storage is switched off in this browser
    }
  }

  function apply() {
    const choice = chosen();
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
    window.Quasar?.Dark.set(dark);
    for (const button of document.querySelectorAll("[data-ps-theme]")) {
      if (button.textContent !== LABELS[choice]) button.textContent = LABELS[choice];
      button.setAttribute("aria-label", `Colours: ${LABELS[choice]}. Change.`);
    }
  }

  apply();
  system.addEventListener("change", apply);
  window.addEventListener("storage", apply);
  document.addEventListener("click", (event) => {
    if (!event.target.closest?.("[data-ps-theme]")) return;
    const next = CHOICES[(CHOICES.indexOf(chosen()) + 1) % CHOICES.length];
    try {
      localStorage.setItem("penstock-theme", next);
    } catch {
      return;
    }
    apply();
  });
  window.penstockTheme = { apply };
})();
