/** What went wrong with an answer, said plainly, with what can be done about it. A wait counts down by itself. */

import { h, setText } from "../dom.js";

const TITLES = {
  busy: "The server is full",
  away: "The server takes no requests now",
  key: "The server wants a key",
  lost: "Connection lost",
  refused: "The server refused this request",
  broken: "Something broke",
};
const ADVICE = {
  lost: "What came so far is kept. Is the server still running?",
  broken: "The server's log has more about it.",
};

/** `again` is called by the button; null where trying again makes no sense. */
export function troubleNotice(error, again) {
  const button = h("button", { type: "button", class: "plain-button", onclick: again, "data-does": "retry" }, "Try again");
  const notice = h("div", { class: "trouble", role: "alert", "data-kind": error.kind },
    h("strong", {}, TITLES[error.kind] ?? TITLES.broken),
    h("p", {}, sentence(error.message), ADVICE[error.kind] && ` ${ADVICE[error.kind]}`),
    again && button);
  if (again && error.retryAfter) countDown(button, error.retryAfter);
  return notice;
}

/** The server said when: until then, the button says how long. */
function countDown(button, seconds) {
  const until = Date.now() + seconds * 1000;
  const tick = () => {
    const left = Math.ceil((until - Date.now()) / 1000);
    button.disabled = left > 0;
    setText(button, left > 0 ? `Try again in ${left} s` : "Try again");
    if (left > 0 && (button.isConnected || left > seconds - 2)) setTimeout(tick, 250);
  };
  tick();
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
