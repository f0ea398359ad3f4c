/** Starts the page: learns what the server serves, asks for a key if it wants one, shows one view on small screens. */

import { hasKey, request, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $ } from "./dom.js";
import { Attachments } from "./images.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";

const RETRY_MS = 3000;

const settings = new Settings();
const attachments = new Attachments();
const live = new Live();
const chat = new Chat(settings, attachments, (error) => error.status === 401 && askForKey());

async function connect() {
  let server;
  try {
    server = await (await request("webui/server.json")).json();
  } catch (error) {
    if (error.status === 401) askForKey();
    else setTimeout(connect, RETRY_MS); // it is starting, or out of reach
    return;
  }
  $("key-form").hidden = true;
  $("key-state").hidden = !hasKey();
  settings.offer(server);
  attachments.offer(server.max_images);
  $("served").textContent = server.models[0];
  $("served").title = `${server.models.join(", ")} · up to ${server.max_model_len} tokens · Tokenmill ${server.version}`;
  document.title = `${server.models[0]} · Tokenmill`;
}

function askForKey() {
  if (hasKey()) {
    $("key-hint").textContent = "The server does not know this key.";
    $("key-hint").classList.add("wrong");
  }
  $("key-form").hidden = false;
  $("key").value = "";
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  connect();
  live.start();
});

$("forget-key").addEventListener("click", () => {
  setKey("");
  location.reload();
});

for (const tab of document.querySelectorAll("[data-shows]")) {
  tab.addEventListener("click", () => {
    document.body.dataset.view = tab.dataset.shows;
    document.querySelector("[aria-current]").removeAttribute("aria-current");
    tab.setAttribute("aria-current", "true");
  });
}

for (const idea of document.querySelectorAll("#ideas button")) {
  idea.addEventListener("click", () => chat.suggest(idea.textContent));
}

connect();
live.start();
