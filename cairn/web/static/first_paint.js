/** The chosen theme, before anything is drawn: a classic script, because modules run after the first paint. */
try {
  const theme = localStorage.getItem("cairn.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage is forbidden here: the system's theme it is
}
