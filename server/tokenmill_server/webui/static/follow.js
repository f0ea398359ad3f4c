/** Keeps the end of a growing view in sight, unless the reader has scrolled away from it. */

const NEAR_PX = 40;

/** `grew` is to be called when the content of `view` has grown, `toEnd` to follow in any case. */
export function followEnd(view) {
  let follows = true;
  // Content that grows scrolls nothing, so an event comes from the reader or from here.
  view.addEventListener("scroll", () => {
    follows = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR_PX;
  });
  const grew = () => follows && (view.scrollTop = view.scrollHeight);
  const toEnd = () => {
    follows = true;
    grew();
  };
  return { grew, toEnd };
}
