// Samples an answer to a picture from Fovea over gRPC and prints each token as it is made.
import { readFile } from "node:fs/promises";
import { parseArgs } from "node:util";

import { ChannelCredentials, createChannel, createClientFactory, Metadata } from "nice-grpc";
import { deadlineMiddleware } from "nice-grpc-client-middleware-deadline";
import { ErrorInfo, errorDetailsClientMiddleware, RichClientError } from "nice-grpc-error-details";

import { type GatewayServiceClient, GatewayServiceDefinition } from "./gen/fovea/api/v1/gateway.js";
import { type Chunk, ImageFormat, type ModelInput } from "./gen/fovea/api/v1/model_input.js";
import { FinishReason } from "./gen/fovea/api/v1/sampler.js";

const USAGE = `usage: sample [OPTION]... IMAGE TOKENS_BEFORE TOKENS_AFTER
  --address HOST:PORT  the gateway's gRPC server (default 127.0.0.1:8001)
  --api-key KEY        as the gateway knows it (default $TINKER_API_KEY)
  --ca FILE            use TLS and trust the authorities of this PEM file
  --model NAME         base model (default: the one that is served)
  --max-tokens N       the most new tokens (default 16)
  --temperature T      0 takes the most likely token (default 1)
  --seed N             makes draws repeatable (default 0)
  --timeout SECONDS    deadline of everything together (default 60)`;

const OPTIONS = {
  address: { type: "string", default: "127.0.0.1:8001" },
  "api-key": { type: "string", default: process.env.TINKER_API_KEY ?? "" },
  ca: { type: "string" },
  model: { type: "string" },
  "max-tokens": { type: "string", default: "16" },
  temperature: { type: "string", default: "1" },
  seed: { type: "string", default: "0" },
  timeout: { type: "string", default: "60" },
} as const;

function parse() {
  return parseArgs({ options: OPTIONS, allowPositionals: true });
}

type Options = ReturnType<typeof parse>["values"];

function number(text: string, form = /^-?\d*\.?\d+$/): number {
  if (!form.test(text)) throw new Error(`${text} is not a number, or not a whole one`);
  return Number(text);
}

/** Packs token ids, separated by spaces, as little-endian int32. */
function tokenChunk(ids: string): Chunk {
  const words = ids.split(/\s+/).filter(Boolean);
  const tokens = Buffer.alloc(4 * words.length);
  words.forEach((word, i) => tokens.writeInt32LE(number(word, /^\d+$/), 4 * i));
  return { kind: { $case: "tokens", tokens: { tokens } } };
}

async function readPrompt(path: string, before: string, after: string): Promise<ModelInput> {
  const format = path.toLowerCase().endsWith(".png") ? ImageFormat.IMAGE_FORMAT_PNG : ImageFormat.IMAGE_FORMAT_JPEG;
  const image: Chunk = { kind: { $case: "image", image: { data: await readFile(path), format } } };
  return { chunks: [tokenChunk(before), image, tokenChunk(after)] };
}

async function sample(fovea: GatewayServiceClient, sessionId: string, prompt: ModelInput, options: Options) {
  const baseModel = options.model ?? (await fovea.getCapabilities({})).models[0].name;
  const weights = { $case: "baseModel", baseModel } as const;
  const { samplingSessionId } = await fovea.createSamplingSession({ sessionId, weights });
  const params = {
    maxTokens: number(options["max-tokens"]),
    temperature: number(options.temperature),
    seed: number(options.seed),
  };
  let total = 0;
  for await (const { event } of fovea.sampleTokens({ samplingSessionId, prompt, sampleCount: 1, params })) {
    if (event?.$case !== "delta") continue;
    const { tokens, logprobs, finishReason } = event.delta;
    for (let at = 0; at < tokens.length; at += 4, total++)
      console.log(tokens.readInt32LE(at), logprobs.readFloatLE(at).toFixed(6));
    if (finishReason !== FinishReason.FINISH_REASON_UNSPECIFIED) console.log(total, "tokens,", finishReason);
  }
}

async function main(): Promise<void> {
  const { values: options, positionals } = parse();
  if (positionals.length !== 3) {
    console.error(USAGE);
    process.exit(2);
  }
  const [path, before, after] = positionals;
  const prompt = await readPrompt(path, before, after);
  const security = options.ca
    ? ChannelCredentials.createSsl(await readFile(options.ca))
    : ChannelCredentials.createInsecure();
  const channel = createChannel(options.address, security);
  const metadata = new Metadata({ "x-api-key": options["api-key"] });
  const deadline = new Date(Date.now() + 1000 * number(options.timeout));
  const fovea: GatewayServiceClient = createClientFactory()
    .use(errorDetailsClientMiddleware)
    .use(deadlineMiddleware)
    .create(GatewayServiceDefinition, channel, { "*": { metadata, deadline } });
  try {
    const { sessionId } = await fovea.createSession({});
    try {
      await sample(fovea, sessionId, prompt, options);
    } finally {
      await fovea.finishSession({ sessionId });
    }
  } finally {
    channel.close();
  }
}

main().catch((error: Error) => {
  console.error(error.message);
  for (const detail of error instanceof RichClientError ? error.extra : [])
    if (detail.$type === ErrorInfo.$type)
      console.error(`reason: ${detail.reason}, field: ${detail.metadata.field ?? ""}`);
  process.exitCode = 1;
});
