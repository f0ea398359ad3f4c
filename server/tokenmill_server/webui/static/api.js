/** Requests to the server that the page came from, with the API key if it wants one. */

const KEY = "tokenmill.key";
const BASE = new URL(".", document.baseURI);

let key = sessionStorage.getItem(KEY) ?? "";

export const hasKey = () => key !== "";

/** The tab keeps it, so that the page can be loaded again; nothing else does. */
export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** An answer that is no success: `message` is the server's, `status` 0 if there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0, detail = {}) {
    super(message);
    this.status = status;
    this.code = detail.code ?? null;
    this.param = detail.param ?? null;
    this.requestId = detail.requestId ?? null;
  }
}

/** The response to a request for `path`, relative to the page. Rejects with ApiError unless it is a success. */
export async function request(path, { body, signal } = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store", credentials: "same-origin" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(new URL(path, BASE), options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server does not answer.");
  }
  if (response.ok) return response;
  throw await asError(response);
}

async function asError(response) {
  const requestId = response.headers.get("x-request-id");
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, { ...error, requestId });
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}.`, response.status, { requestId });
  }
}

/** What the server says of its health: `{status, reason}`, also when it is not well. */
export async function health() {
  const response = await fetch(new URL("health", BASE), { cache: "no-store" });
  return response.json();
}
