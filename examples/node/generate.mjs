// Generate a video: node generate.mjs ADDRESS OUTPUT PROMPT [FIELD=VALUE ...]
//
// The protos are loaded as they are; nothing is generated. Numbers of 64 bits come as strings.
// The last line on standard output is the SHA-256 of the file.
import { createHash } from "node:crypto";
import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const definition = protoLoader.loadSync("chitu_diffusion/v1/generation.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  enums: String,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).chitu_diffusion.v1;

const [address, output, prompt, ...fields] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node generate.mjs ADDRESS OUTPUT PROMPT [FIELD=VALUE ...]");
  process.exit(2);
}
const params = { prompt, ...Object.fromEntries(fields.map((field) => field.split("="))) };
const client = new GenerationService(address, grpc.credentials.createInsecure());

try {
  const done = await generate(params);
  const file = await download(done.task_id);
  const digest = createHash("sha256").update(file).digest("hex");
  if (digest !== done.done.result.sha256) throw new Error("the file was damaged on the way");
  writeFileSync(output, file);
  console.log(digest);
} catch (error) {
  console.error(`error: ${grpc.status[error.code] ?? ""} ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}

async function generate(params) {
  for await (const { event } of client.Generate({ params })) {
    if (event.event === "denoising") {
      console.log(`step ${event.denoising.step}/${event.denoising.of}`);
    } else if (event.event === "done") {
      return event;
    } else if (event.event === "failed" || event.event === "cancelled") {
      throw new Error(JSON.stringify(event[event.event]));
    }
  }
  throw new Error("the stream ended before the task did");
}

async function download(task_id) {
  const chunks = [];
  for await (const { chunk } of client.DownloadResult({ task_id })) chunks.push(chunk.data);
  return Buffer.concat(chunks);
}
