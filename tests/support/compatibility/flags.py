"""Flags of `vllm serve`, by the groups of its help. Whether one works is seen in the table of flags itself."""

VLLM_FLAGS: dict[str, str] = {
    "Frontend": (
        "host port uds api-key api-server-count served-model-name chat-template chat-template-content-format "
        "default-chat-template-kwargs reasoning-effort-map trust-request-chat-template trust-request-mm-kwargs "
        "response-role enable-auto-tool-choice tool-call-parser tool-parser-plugin tool-strict-level "
        "exclude-tools-when-tool-choice-none tool-server reasoning-parser reasoning-parser-plugin lora-modules "
        "return-tokens-as-token-ids enable-prompt-tokens-details enable-force-include-usage "
        "enable-per-request-metrics enable-server-load-tracking enable-tokenizer-info-endpoint "
        "sse-keep-alive-interval enable-log-requests enable-log-outputs enable-log-deltas max-log-len log-error-stack "
        "uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints allowed-origins "
        "allowed-methods allowed-headers allow-credentials ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs "
        "ssl-ciphers enable-ssl-refresh root-path middleware enable-request-id-headers disable-fastapi-docs "
        "enable-offline-docs h11-max-incomplete-event-size h11-max-header-count fingerprint-mode fingerprint-value "
        "headless grpc grpc-port tokens-only enable-scale-out shutdown-timeout"
    ),
    "Model and loading": (
        "model runner convert tokenizer tokenizer-mode trust-remote-code dtype seed max-model-len quantization "
        "enforce-eager revision code-revision tokenizer-revision hf-token hf-overrides hf-config-path "
        "generation-config override-generation-config max-logprobs logprobs-mode model-impl logits-processors "
        "enable-prompt-embeds skip-tokenizer-init disable-sliding-window enable-sleep-mode pooler-config "
        "renderer-num-workers allowed-local-media-path allowed-media-domains load-format download-dir "
        "safetensors-load-strategy model-loader-extra-config ignore-patterns use-tqdm-on-load cpu-offload-gb"
    ),
    "Parallel": (
        "tensor-parallel-size pipeline-parallel-size data-parallel-size data-parallel-size-local data-parallel-rank "
        "data-parallel-start-rank data-parallel-address data-parallel-rpc-port data-parallel-backend "
        "data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb "
        "enable-expert-parallel all2all-backend enable-eplb eplb-config expert-placement-strategy enable-dbo "
        "decode-context-parallel-size prefill-context-parallel-size distributed-executor-backend nnodes node-rank "
        "master-addr master-port max-parallel-loading-workers disable-custom-all-reduce worker-cls "
        "worker-extension-cls numa-bind numa-bind-nodes numa-bind-cpus device-ids distributed-timeout-seconds "
        "dp-sync-interval"
    ),
    "Cache": (
        "block-size gpu-memory-utilization kv-cache-memory-bytes kv-cache-dtype num-gpu-blocks-override "
        "enable-prefix-caching prefix-caching-hash-algo kv-offloading-size kv-offloading-backend "
        "kv-sharing-fast-prefill kv-transfer-config kv-events-config"
    ),
    "Scheduler": (
        "max-num-batched-tokens max-num-seqs max-num-active-seqs max-num-scheduled-tokens max-num-queued-reqs "
        "max-num-queued-tokens enable-chunked-prefill long-prefill-token-threshold "
        "long-prefill-token-threshold-adaptive prefill-schedule-interval scheduling-policy "
        "scheduler-reserve-full-isl watermark async-scheduling stream-interval scheduler-cls "
        "disable-hybrid-kv-cache-manager disable-chunked-mm-input"
    ),
    "Multimodal": (
        "limit-mm-per-prompt language-model-only media-io-kwargs mm-processor-kwargs mm-processor-cache-gb "
        "mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-hasher-algorithm mm-encoder-tp-mode "
        "mm-encoder-attn-backend enable-mm-embeds skip-mm-profiling interleave-mm-strings video-pruning-rate"
    ),
    "LoRA, speculation, structured outputs": (
        "enable-lora max-loras max-lora-rank max-cpu-loras lora-dtype fully-sharded-loras lora-target-modules "
        "default-mm-loras speculative-config spec-method spec-model spec-tokens structured-outputs-config"
    ),
    "Kernels and observability": (
        "optimization-level performance-mode compilation-config max-cudagraph-capture-size attention-backend "
        "attention-config linear-backend moe-backend kernel-config disable-log-stats aggregate-engine-logging "
        "log-level otlp-traces-endpoint collect-detailed-traces show-hidden-metrics-for-version kv-cache-metrics "
        "kv-cache-metrics-sample custom-histogram-buckets enable-mfu-metrics cudagraph-metrics "
        "enable-logging-iteration-details per-request-spec-decode-metrics profiler-config additional-config"
    ),
}
