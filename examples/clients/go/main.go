// Samples an answer to a picture from Fovea over gRPC and prints each token as it is made.
package main

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	api "fovea.example/sample/gen/fovea/api/v1"
)

var (
	address     = flag.String("address", "127.0.0.1:8001", "host:port of the gateway's gRPC server")
	apiKey      = flag.String("api-key", os.Getenv("TINKER_API_KEY"), "as the gateway knows it")
	ca          = flag.String("ca", "", "use TLS and trust the authorities of this PEM file")
	model       = flag.String("model", "", "base model (default: the one that is served)")
	maxTokens   = flag.Int("max-tokens", 16, "the most new tokens")
	temperature = flag.Float64("temperature", 1, "0 takes the most likely token")
	seed        = flag.Int64("seed", 0, "makes draws repeatable")
	timeout     = flag.Float64("timeout", 60, "deadline of everything together, in seconds")
)

func main() {
	if flag.Parse(); flag.NArg() != 3 {
		fmt.Fprintln(os.Stderr, "usage: sample [OPTION]... IMAGE TOKENS_BEFORE TOKENS_AFTER")
		flag.PrintDefaults()
		os.Exit(2)
	}
	data, err := os.ReadFile(flag.Arg(0))
	check(err)
	format := api.ImageFormat_IMAGE_FORMAT_JPEG
	if strings.HasSuffix(strings.ToLower(flag.Arg(0)), ".png") {
		format = api.ImageFormat_IMAGE_FORMAT_PNG
	}
	image := &api.Chunk{Kind: &api.Chunk_Image{Image: &api.ImageChunk{Data: data, Format: format}}}
	prompt := &api.ModelInput{Chunks: []*api.Chunk{tokenChunk(flag.Arg(1)), image, tokenChunk(flag.Arg(2))}}

	security := insecure.NewCredentials()
	if *ca != "" {
		security, err = credentials.NewClientTLSFromFile(*ca, "")
		check(err)
	}
	channel, err := grpc.NewClient(*address, grpc.WithTransportCredentials(security))
	check(err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(*timeout*float64(time.Second)))
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "x-api-key", *apiKey)
	fovea := api.NewGatewayServiceClient(channel)
	session, err := fovea.CreateSession(ctx, &api.CreateSessionRequest{})
	check(err)
	err = sample(ctx, fovea, session.SessionId, prompt)
	_, finished := fovea.FinishSession(ctx, &api.FinishSessionRequest{SessionId: session.SessionId})
	check(err)
	check(finished)
}

func sample(ctx context.Context, fovea api.GatewayServiceClient, session string, prompt *api.ModelInput) error {
	if *model == "" {
		served, err := fovea.GetCapabilities(ctx, &api.GetCapabilitiesRequest{})
		if err != nil {
			return err
		}
		*model = served.Models[0].Name
	}
	weights := &api.CreateSamplingSessionRequest_BaseModel{BaseModel: *model}
	opened, err := fovea.CreateSamplingSession(ctx, &api.CreateSamplingSessionRequest{SessionId: session, Weights: weights})
	if err != nil {
		return err
	}
	count, heat := int32(*maxTokens), float32(*temperature)
	stream, err := fovea.SampleTokens(ctx, &api.SampleTokensRequest{
		SamplingSessionId: opened.SamplingSessionId, Prompt: prompt, SampleCount: 1,
		Params: &api.SamplingParams{MaxTokens: &count, Temperature: &heat, Seed: seed},
	})
	for total := 0; err == nil; {
		var event *api.SampleTokensResponse
		if event, err = stream.Recv(); err != nil {
			break
		}
		delta := event.GetDelta()
		tokens, logprobs := make([]int32, len(delta.GetTokens())/4), make([]float32, len(delta.GetTokens())/4)
		binary.Decode(delta.GetTokens(), binary.LittleEndian, tokens)
		binary.Decode(delta.GetLogprobs(), binary.LittleEndian, logprobs)
		for i, token := range tokens {
			fmt.Printf("%d %.6f\n", token, logprobs[i])
		}
		if total += len(tokens); delta.GetFinishReason() != api.FinishReason_FINISH_REASON_UNSPECIFIED {
			fmt.Println(total, "tokens,", delta.GetFinishReason())
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// tokenChunk packs token ids, separated by spaces, as little-endian int32.
func tokenChunk(ids string) *api.Chunk {
	packed := []byte{}
	for _, id := range strings.Fields(ids) {
		token, err := strconv.ParseInt(id, 10, 32)
		check(err)
		packed = binary.LittleEndian.AppendUint32(packed, uint32(token))
	}
	return &api.Chunk{Kind: &api.Chunk_Tokens{Tokens: &api.TokenChunk{Tokens: packed}}}
}

// check ends the program with exit code 1 on an error, saying which field it is about.
func check(err error) {
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, err)
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			fmt.Fprintf(os.Stderr, "reason: %s, field: %s\n", info.Reason, info.Metadata["field"])
		}
	}
	os.Exit(1)
}
