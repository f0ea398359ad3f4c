/** Server-sent events of a response: one object per event, until the server says that it is done. */

import { ApiError } from "./api.js";

/** Yields the JSON of every event. Throws ApiError for an event with an error, and for a stream that breaks off. */
export async function* events(response) {
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) {
      const requestId = response.headers.get("x-request-id");
      throw new ApiError(event.error.message, 200, { ...event.error, requestId });
    }
    yield event;
  }
  throw new ApiError("The connection to the server was lost before the answer was complete.");
}

/** The data of each event: its `data:` lines, joined. Chunks of the network may end anywhere. */
async function* eventData(body) {
  let lines = [];
  for await (const line of textLines(body)) {
    if (line.startsWith("data:")) lines.push(line.slice(5).replace(/^ /, ""));
    if (line === "" && lines.length) {
      yield lines.join("\n");
      lines = [];
    }
  }
}

async function* textLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield line.endsWith("\r") ? line.slice(0, -1) : line;
    }
  } finally {
    reader.cancel().catch(() => {}); // a reader that stopped early keeps no connection
  }
}
