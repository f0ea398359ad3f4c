// The official client for Node.js. `test_clients.py` runs this by Node's own test runner and names the server.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import * as z from "zod";

const { CLIENT_BASE_URL: baseURL, CLIENT_API_KEY: apiKey, CLIENT_MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, temperature: 0, max_tokens: 12 };
const weatherParameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Zürich"] }, days: { type: "integer", enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "get_weather", parameters: weatherParameters } };

const checkWeather = ({ city, days, ...rest }) => {
  assert.ok(["Paris", "Zürich"].includes(city), city);
  assert.ok([1, 2, 3].includes(days), `${days}`);
  assert.deepEqual(rest, {});
};

test("a chat, whole and streamed", async () => {
  const { data: whole, response, request_id: requestId } = await client.chat.completions.create(asked).withResponse();
  assert.equal(requestId, response.headers.get("x-request-id"));
  assert.ok(whole.choices[0].message.content);
  assert.ok(whole.usage.completion_tokens > 1);

  const chunks = [];
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) chunks.push(chunk);
  assert.deepEqual(chunks.at(-1).usage, whole.usage);
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);

  const gathered = client.chat.completions.stream(asked);
  let snapshot = "";
  gathered.on("content", (_, soFar) => (snapshot = soFar));
  assert.equal((await gathered.finalMessage()).content, text);
  assert.equal(snapshot, text);
});

test("several choices with log-probabilities, gathered by the client", async () => {
  const fields = { ...asked, n: 2, logprobs: true, top_logprobs: 2, seed: 7, temperature: 1 };
  const { choices } = await client.chat.completions.stream(fields).finalChatCompletion();
  assert.deepEqual(choices.map((choice) => choice.index).sort(), [0, 1]);
  for (const choice of choices) assert.equal(choice.logprobs.content[0].top_logprobs.length, 2);
});

test("text completions and models", async () => {
  const fields = { model, prompt: ["One, two,", "Red, green,"], max_tokens: 6, temperature: 0 };
  const whole = await client.completions.create(fields);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  }
  assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
  const names = [];
  for await (const served of client.models.list()) names.push(served.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("an answer in the form of a zod schema", async () => {
  const Pet = z.object({ name: z.string().max(20), kind: z.enum(["cat", "dog"]), legs: z.number().int().nullable() });
  const fields = { ...asked, max_tokens: 200, response_format: zodResponseFormat(Pet, "pet") };
  const whole = await client.chat.completions.parse(fields);
  assert.deepEqual(Pet.parse(whole.choices[0].message.parsed), whole.choices[0].message.parsed);
  const streamed = await client.chat.completions.stream(fields).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, whole.choices[0].message.parsed);
  await assert.rejects(client.chat.completions.parse({ ...fields, max_tokens: 4 }), OpenAI.LengthFinishReasonError);
});

test("calls of tools, whole and streamed", async () => {
  const fields = { ...asked, max_tokens: 120, tools: [weather], tool_choice: "required", parallel_tool_calls: false };
  const [choice] = (await client.chat.completions.create(fields)).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  const [call] = choice.message.tool_calls;
  checkWeather(JSON.parse(call.function.arguments));
  const streamed = (await client.chat.completions.stream(fields).finalMessage()).tool_calls;
  assert.deepEqual(streamed.map((each) => each.function), [call.function]);
});

for (const stream of [false, true]) {
  test(`the client runs the functions itself, ${stream ? "streamed" : "whole"}`, async () => {
    const calls = [];
    const run = (given) => (calls.push(given), { sky: "clear" });
    const runnable = { ...weather.function, parse: JSON.parse, function: run };
    const fields = { ...asked, max_tokens: 120, tools: [{ type: "function", function: runnable }], stream };
    const forced = { ...fields, tool_choice: "required", parallel_tool_calls: false };
    const runner = client.chat.completions.runTools(forced, { maxChatCompletions: 2 });
    await runner.done();
    assert.equal(calls.length, 2);
    calls.forEach(checkWeather);
    const roles = runner.messages.map((message) => message.role);
    assert.deepEqual(roles, ["user", "assistant", "tool", "assistant", "tool"]);
  });
}

test("errors have their classes", async () => {
  const refused = (fields, options) => client.chat.completions.create({ ...asked, ...fields }, options);
  await assert.rejects(refused({ temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.param, error.code, error.type], ["temperature", "invalid_value", "invalid_request_error"]);
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(refused({ model: "nobody" }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    return error.code === "model_not_found";
  });
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), (error) => {
    assert.ok(error instanceof OpenAI.AuthenticationError);
    return error.code === "invalid_api_key";
  });
  const endless = { max_tokens: 4000, ignore_eos: true };
  await assert.rejects(refused(endless, { timeout: 300 }), OpenAI.APIConnectionTimeoutError);
  await assert.rejects(refused(endless, { headers: { "X-Request-Timeout-Ms": "500" }, maxRetries: 2 }), (error) => {
    assert.ok(error instanceof OpenAI.InternalServerError);
    return error.status === 504 && error.code === "deadline_exceeded";
  });
});

test("streams that the client leaves", async () => {
  const endless = { ...asked, max_tokens: 4000, ignore_eos: true, stream: true };
  for await (const chunk of await client.chat.completions.create(endless)) {
    if (chunk.choices[0].delta.content) break;
  }
  const gathered = client.chat.completions.stream(endless);
  gathered.on("content", () => gathered.abort());
  await assert.rejects(gathered.done(), OpenAI.APIUserAbortError);
});
