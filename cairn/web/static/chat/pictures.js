/**
 * Pictures that go with the next message: pasted, dropped or chosen, shown small above the text until it is sent.
 *
 * A large one is made smaller here, so that a conversation stays small enough to be kept in this browser.
 */

import { h, iconButton } from "../dom.js";

const MOST = 8; // pictures of one message
const LONGEST = 1024; // pixels of a side
const SMALL_BYTES = 300_000; // a file that is sent as it is

/** `changed` is called when there are more or fewer; `refuse(text)` says why a file was not taken. */
export function makePictures(changed, refuse) {
  const element = h("div", { class: "attached", hidden: true });
  let urls = [];
  let sees = false;

  function draw() {
    element.hidden = !urls.length;
    element.replaceChildren(...urls.map((url, at) => h("span", { class: "attachment" },
      h("img", { src: url, alt: `Picture ${at + 1}` }),
      iconButton("close", `Remove picture ${at + 1}`, () => {
        urls = urls.filter((_, other) => other !== at);
        draw();
      }))));
    changed();
  }

  async function add(files) {
    const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
    if (!pictures.length) return;
    if (!sees) return refuse("This model reads text only, so it cannot take a picture.");
    for (const file of pictures.slice(0, MOST - urls.length)) {
      try {
        urls = [...urls, await read(file)];
      } catch {
        refuse(`${file.name || "The picture"} cannot be read.`);
      }
    }
    draw();
  }

  return {
    element,
    add,
    /** Pasting into `area` and dropping onto `place` add pictures. */
    listen(area, place) {
      area.addEventListener("paste", (event) => {
        if (![...event.clipboardData.files].some(({ type }) => type.startsWith("image/"))) return;
        event.preventDefault();
        add(event.clipboardData.files);
      });
      place.addEventListener("dragover", (event) => event.preventDefault());
      place.addEventListener("drop", (event) => {
        event.preventDefault();
        add(event.dataTransfer.files);
      });
    },
    setSees: (now) => (sees = now),
    get count() {
      return urls.length;
    },
    /** All of them, which are then gone from here. */
    take() {
      const taken = urls;
      urls = [];
      draw();
      return taken;
    },
  };
}

/** A data URL of a picture, made smaller where it is large. */
async function read(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= SMALL_BYTES) return asURL(file);
  const canvas = h("canvas", { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function asURL(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
